// start.js: keyboard, and the start of the page.
document.addEventListener('keydown', e => {
  if (e.isComposing) return;
  const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName), dialog = $('settings').open;
  const on = (condition, act) => { if (condition && !dialog) e.preventDefault(), act(); };
  const alt = e.altKey && !e.ctrlKey && !e.metaKey;
  on(e.key === 'Escape' && !$('models').classList.contains('hidden'), () => openModels(false));
  on(e.key === 'Escape' && current && live.has(current.id), stopAnswer);
  on(e.key === 'Escape' && phone.matches, closeOnPhone);
  on(alt && e.code === 'KeyN', newChat);
  on(alt && e.code === 'KeyS', toggleSide);
  on(alt && e.code === 'KeyK', () => { document.body.classList.remove('closed'); $('find').select(); });
  on(alt && e.code === 'Comma', () => openSettings());
  on(e.key === '/' && !typing, () => $('input').focus());
});
function toggleSide() { document.body.classList.toggle('closed'); }
$('toggle').onclick = toggleSide;
$('scrim').onclick = toggleSide;
$('new').onclick = $('new-small').onclick = newChat;
$('open-settings').onclick = () => openSettings();
$('theme').onclick = () => { settings.theme = isDark() ? 'light' : 'dark'; saveSettings(); applyLook(); };
darkness.addEventListener('change', applyLook);
addEventListener('pagehide', () => { for (const id of live.keys()) saveChat(chats.get(id) || {}); });
addEventListener('storage', e => { // another tab
  const id = e.key && e.key.startsWith(PREFIX + 'chat:') && e.key.slice(PREFIX.length + 5);
  if (!id || live.has(id)) return;
  const chat = cleanChat(parse(e.newValue));
  if (chat) chats.set(id, chat);
  else chats.delete(id);
  if (current && current.id === id) current = undefined, showChat(chat);
  else showList();
});
// An answer that the last visit left unfinished.
for (const chat of chats.values()) for (const node of chat.nodes) if (node.role === 'assistant' && !node.finish && !node.error) node.finish = 'broken';
$('brand').prepend(logo(28));
$('hello').prepend(logo(76));
if (!phone.matches) document.body.classList.remove('closed');
current = chats.get(location.hash.slice(1)) || null;
applyLook();
$('input').focus();
