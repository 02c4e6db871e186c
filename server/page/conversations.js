// conversations.js: the list of conversations, export and import.
function showList() {
  const day = 86400e3, today = new Date().setHours(0, 0, 0, 0), groups = {today: [], yesterday: [], week: [], earlier: []};
  for (const chat of [...chats.values()].sort((a, b) => b.updated - a.updated))
    groups[chat.updated >= today ? 'today' : chat.updated >= today - day ? 'yesterday' : chat.updated >= today - 7 * day ? 'week' : 'earlier'].push(chat);
  const list = [], wanted = $('find').value.toLowerCase().split(/\s+/).filter(word => word);
  if (wanted.length) { // the latest first
    const found = Object.values(groups).flat().map(chat => [chat, foundIn(chat, wanted)]).filter(f => f[1]);
    $('chats').replaceChildren(...found.length ? found.map(f => chatItem(...f)) : [h('p', {}, t('nothing'))]);
    return;
  }
  for (const [name, some] of Object.entries(groups)) if (some.length) list.push(h('h2', {}, t(name)), ...some.map(chat => chatItem(chat)));
  $('chats').replaceChildren(...list);
}
// The message that has most of the words (-1: the title), and its text around the first; null: a word is nowhere.
function foundIn(chat, wanted) {
  const texts = [chat.title, ...chat.nodes.map(n => n.text)], small = texts.map(text => text.toLowerCase());
  if (!wanted.every(word => small.some(text => text.includes(word)))) return null;
  const has = small.map(text => wanted.filter(word => text.includes(word))), k = has.findIndex(some => some.length === Math.max(...has.map(s => s.length)));
  const at = small[k].indexOf(has[k][0]);
  return {index: k - 1, text: (at > 20 ? '…' : '') + cut(texts[k].slice(Math.max(0, at - 20)).replace(/^[\udc00-\udfff]/, ''), 100)};
}
// Opens a conversation, at a message if one was found: also if it is not in the branch that was shown last.
function openChat(chat, found) {
  if (found && found.index >= 0 && !pathOf(chat).includes(found.index)) chat.at = lastLeaf(chat, found.index);
  showChat(chat);
  const view = found && views.get(found.index);
  if (view) stick = false, view.node.scrollIntoView({block: 'center'});
  closeOnPhone();
}
$('find').addEventListener('input', showList);
$('find').addEventListener('keydown', e => {
  if (e.isComposing) return;
  if (e.key === 'Escape') e.stopPropagation(), $('find').value = '', showList(), $('input').focus();
  if (e.key === 'Enter') $('chats').querySelector('.chat button')?.click();
  if (e.key === 'ArrowDown') e.preventDefault(), $('chats').querySelector('.chat button')?.focus();
});
$('chats').addEventListener('keydown', e => { // from one to the next
  const step = {ArrowDown: 1, ArrowUp: -1}[e.key], all = [...$('chats').querySelectorAll('.chat > button:first-child')], at = all.indexOf(document.activeElement);
  if (!step || at < 0) return;
  e.preventDefault();
  (all[at + step] || (step < 0 ? $('find') : all[at])).focus();
});
function chatItem(chat, found) {
  const act = (name, picture, run) => h('button', {class: 'icon', type: 'button', title: t(name), 'aria-label': t(name), onclick: run}, icon(picture, 15));
  const item = h('div', {class: 'chat' + (chat === current ? ' on' : '')});
  const rename = () => {
    const input = h('input', {'aria-label': t('rename'), maxlength: 200});
    input.value = chat.title;
    let over = false;
    const end = good => {
      if (over) return;
      over = true;
      if (good && input.value.trim()) chat.title = input.value.trim(), saveChat(chat);
      if (chat === current) showChat(chat);
      else showList();
    };
    input.addEventListener('keydown', e => {
      if (e.isComposing) return;
      if (e.key === 'Enter') end(true);
      if (e.key === 'Escape') e.stopPropagation(), end(false);
    });
    input.addEventListener('blur', () => end(true));
    item.replaceChildren(input);
    input.select();
  };
  item.append(h('button', {type: 'button', title: chat.title, 'aria-current': chat === current && 'true', onclick: () => openChat(chat, found), ondblclick: rename}, chat.title || t('untitled'),
    found && found.index >= 0 && found.text !== chat.title ? h('span', {class: 'found'}, found.text) : ''));
  if (live.has(chat.id)) item.append(h('span', {class: 'busy'}));
  else item.append(act('rename', 'edit', rename), act('remove', 'bin', () => removeChat(chat)));
  return item;
}
function removeChat(chat) {
  chats.delete(chat.id);
  store.removeItem(PREFIX + 'chat:' + chat.id);
  unkept.delete(chat.id);
  for (const id of [...unkept]) saveChat(chats.get(id));
  if (chat === current) showChat(null);
  else showList();
  toast(t('removed'), t('undo'), () => { chats.set(chat.id, chat); saveChat(chat); showChat(chat); });
}
function newChat() {
  showChat(null);
  closeOnPhone();
  $('input').focus();
}
const phone = matchMedia('(max-width: 760px)');
function closeOnPhone() { if (phone.matches) document.body.classList.add('closed'); }

const lineOf = chat => JSON.stringify({title: chat.title, messages: pathOf(chat).map(i => chat.nodes[i]).map(n =>
  n.thought ? {role: n.role, content: n.text, reasoning_content: n.thought} : {role: n.role, content: contentOf(n)}), ...chat}) + '\n';
function exportChats(list, name) {
  const url = URL.createObjectURL(new Blob(list.map(lineOf), {type: 'application/jsonl'}));
  h('a', {href: url, download: name.replace(/[^\p{L}\p{N} _-]/gu, '').trim().slice(0, 60) + '.jsonl'}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
async function importChats(file) {
  const text = file.size < 1e8 ? await file.text() : '', whole = parse(text);
  const list = Array.isArray(whole) ? whole : whole ? [whole] : text.split('\n').map(parse);
  let count = 0;
  for (const raw of list) {
    const chat = cleanChat(raw);
    if (!chat) continue;
    if (chats.has(chat.id)) { // the same one: skip it; another: keep both
      if (JSON.stringify(chats.get(chat.id).nodes) === JSON.stringify(chat.nodes)) { count++; continue; }
      chat.id = newId();
    }
    chats.set(chat.id, chat);
    saveChat(chat);
    count++;
  }
  showList();
  toast(count ? t('imported', count) : t('notImported'));
}
