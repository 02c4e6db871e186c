// composer.js: the input.
function showComposer() {
  const busy = !!current && live.has(current.id), input = $('input');
  $('send').replaceChildren(icon(busy ? 'stop' : 'send', 20));
  $('send').classList.toggle('stop', busy);
  $('send').title = t(busy ? 'stop' : 'send');
  $('send').setAttribute('aria-label', $('send').title);
  $('send').disabled = !busy && (!input.value.trim() || reading.length > 0);
  const last = current && current.nodes[current.at];
  $('room').textContent = last && last.used && model.limit && last.used > model.limit / 2 ? t('room', last.used.toLocaleString(), model.limit.toLocaleString()) : '';
  $('think').setAttribute('aria-pressed', settings.think);
  $('docs').setAttribute('aria-pressed', settings.docs);
}
function grow() {
  const input = $('input');
  input.style.height = 'auto';
  input.style.height = input.scrollHeight + 'px';
}
function send(text) {
  if (!text.trim() || reading.length || (current && live.has(current.id))) return;
  $('input').value = '';
  grow();
  const chat = current || {id: newId(), title: '', created: Date.now(), updated: Date.now(), nodes: [], at: -1};
  ask(chat, chat.at, text.trim(), attached);
  attached = [];
  showFiles();
}
$('input').addEventListener('input', () => { grow(); showComposer(); });
$('input').addEventListener('keydown', e => {
  if (e.isComposing || e.keyCode === 229) return; // an input method is composing
  if (e.key === 'Enter' && !e.shiftKey && !matchMedia('(pointer: coarse)').matches) {
    e.preventDefault();
    send($('input').value);
  } else if (e.key === 'ArrowUp' && !$('input').value && current && !live.has(current.id)) {
    const last = pathOf(current).findLast(i => current.nodes[i].role === 'user');
    if (last !== undefined) e.preventDefault(), views.get(last).edit();
  }
});
$('send').onclick = () => current && live.has(current.id) ? stopAnswer() : send($('input').value);
$('docs').onclick = () => { settings.docs = !settings.docs; saveSettings(); showComposer(); };
$('docs').classList.toggle('hidden', !HAS_DOCS);
$('think').onclick = () => { settings.think = !settings.think; saveSettings(); showComposer(); };
$('down').onclick = () => { stick = true; toEnd(); };
