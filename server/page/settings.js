// settings.js: the dialog of settings, language and appearance.
function chooser(name, values) {
  const node = h('div', {class: 'choice', role: 'group'});
  const show = () => node.replaceChildren(...values.map(([value, label]) => h('button', {type: 'button', 'aria-pressed': String(settings[name] === value), onclick: () => {
    settings[name] = value;
    saveSettings();
    applyLook();
    if (name === 'language') openSettings();
    else show();
  }}, label)));
  show();
  return node;
}
function openSettings(focus) {
  const dialog = $('settings'), button = (name, act, kind = 'plain') => h('button', {class: kind, type: 'button', onclick: act}, t(name));
  const system = h('textarea', {id: 'system', dir: 'auto', oninput: e => { settings.system = e.target.value; saveSettings(); }});
  system.value = settings.system;
  const stops = h('textarea', {id: 'stops', dir: 'auto', oninput: e => { settings.stops = e.target.value; saveSettings(); }});
  stops.value = settings.stops;
  const key = h('input', {id: 'key', type: 'password', autocomplete: 'off', oninput: e => { settings.key = e.target.value.trim(); saveSettings(); }, onchange: checkServer});
  key.value = settings.key;
  const fields = Object.entries(SAMPLING).map(([name, [min, max, step]]) => {
    const input = h('input', {type: 'number', name, min, max, step: step < 1 ? 'any' : step, placeholder: t('default'), inputmode: 'decimal', oninput: () => {
      if (!input.value || !input.checkValidity()) delete settings.sampling[name];
      else settings.sampling[name] = Number(input.value);
      saveSettings();
    }});
    input.value = settings.sampling[name] ?? '';
    return h('label', {}, t(name), input);
  });
  const file = h('input', {type: 'file', class: 'hidden', accept: '.jsonl,.json', onchange: () => file.files[0] && importChats(file.files[0])});
  const removeAll = button('removeAll', () => {
    if (!removeAll.dataset.sure) return removeAll.dataset.sure = 1, removeAll.textContent = t('sure', chats.size);
    for (const chat of chats.values()) store.removeItem(PREFIX + 'chat:' + chat.id);
    for (const l of [...live.values()].flat()) l.stopped = true, l.stop.abort();
    chats.clear();
    unkept.clear();
    showChat(null);
    dialog.close();
  }, 'plain danger');
  removeAll.disabled = chats.size === 0;
  const keys = [['Enter', 'kSend'], ['Shift Enter', 'kLine'], ['Esc', 'kStop'], ['Alt N', 'kNew'], ['Alt S', 'kSide'], ['Alt K', 'kFind'], ['/', 'kFocus'], ['↑', 'kEdit'], ['Alt ,', 'kSettings']];
  dialog.setAttribute('aria-label', t('settings'));
  dialog.replaceChildren(
    h('div', {class: 'top'}, h('h2', {tabindex: -1, autofocus: true}, t('settings')), h('button', {class: 'icon', type: 'button', title: t('close'), 'aria-label': t('close'), onclick: () => dialog.close()}, icon('close'))),
    h('div', {class: 'in'},
      h('h3', {}, h('label', {for: 'system'}, t('system'))), system, h('small', {}, t('systemHelp')),
      h('h3', {}, t('sampling')), h('div', {class: 'grid'}, ...fields), h('small', {}, t('samplingHelp')),
      h('h3', {}, h('label', {for: 'stops'}, t('stops'))), stops, h('small', {}, t('stopsHelp')),
      h('div', {class: 'pair'},
        h('div', {}, h('h3', {}, t('look')), chooser('theme', [['auto', t('auto')], ['light', t('light')], ['dark', t('dark')]])),
        h('div', {}, h('h3', {}, t('language')), chooser('language', [['auto', t('auto')], ['en', 'English'], ['zh', '中文']]))),
      h('h3', {}, t('data')), h('div', {class: 'acts'}, button('exportAll', () => exportChats([...chats.values()], TITLE)),
        current ? button('exportOne', () => exportChats([current], current.title)) : '', button('importAll', () => file.click()), removeAll, file), h('small', {}, t('dataHelp')),
      h('h3', {}, h('label', {for: 'key'}, t('key'))), key, h('small', {}, t('keyHelp')),
      h('h3', {}, t('keys')), h('dl', {}, ...keys.flatMap(([combination, name]) => [h('dt', {}, ...combination.split(' ').flatMap(k => [h('kbd', {}, k), ' '])), h('dd', {}, t(name))]))));
  if (!dialog.open) dialog.showModal();
  if (focus) $(focus).focus();
}
$('settings').addEventListener('click', e => { if (e.target === $('settings')) $('settings').close(); }); // beside it

const darkness = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => settings.theme === 'dark' || (settings.theme === 'auto' && darkness.matches);
function applyLook() {
  document.documentElement.dataset.theme = isDark() ? 'dark' : 'light';
  const language = settings.language === 'auto' ? (navigator.language || 'en').toLowerCase().startsWith('zh') ? 'zh' : 'en' : settings.language;
  words = WORDS[language] || WORDS.en;
  document.documentElement.lang = language === 'zh' ? 'zh-CN' : 'en';
  const label = (id, name) => { $(id).title = t(name); $(id).setAttribute('aria-label', t(name)); };
  $('new').replaceChildren(icon('add'), t('new'));
  $('open-settings').replaceChildren(icon('gear'), t('settings'));
  for (const [id, name] of [['toggle', 'menu'], ['new-small', 'add'], ['down', 'down'], ['attach', 'clip']]) $(id).replaceChildren(icon(name));
  $('theme').replaceChildren(icon(isDark() ? 'sun' : 'moon'));
  for (const [id, name] of [['theme', 'theme'], ['toggle', 'toggle'], ['new-small', 'new'], ['down', 'bottom'], ['attach', 'attach'], ['think', 'thinkHelp'], ['docs', 'docsHelp']]) label(id, name);
  $('think').replaceChildren(icon('bulb', 16), t('think'));
  $('think').setAttribute('aria-label', t('think'));
  $('docs').replaceChildren(icon('book', 16), t('docs'));
  $('docs').setAttribute('aria-label', t('docs'));
  $('input').placeholder = t('ask');
  $('input').setAttribute('aria-label', t('ask'));
  $('find').placeholder = t('find');
  $('find').setAttribute('aria-label', t('find'));
  $('hint').textContent = t('hint');
  $('greeting').textContent = t('greeting');
  $('about').textContent = t('about');
  $('starters').replaceChildren(...(STARTERS.length ? STARTERS : t('starters')).map(([picture, text]) =>
    h('button', {type: 'button', onclick: () => send(text)}, icon(picture, 20), h('span', {}, text))));
  const shown = current;
  current = undefined; // everything is rebuilt
  showChat(shown);
  checkServer();
}
