// store.js: settings and conversations in the browser. A conversation is a tree of messages: nodes[i].parent < i, and
// `at` is the leaf that is shown. An edited question or another answer is a new branch. Two answers that were asked for
// together name each other in `beside`.
const PREFIX = 'warp:';
const STARTERS = JSON.parse(document.documentElement.dataset.starters).map(text => ['bulb', text]); // the server's
const HAS_DOCS = document.documentElement.dataset.docs === '1';
const SETTINGS = {theme: 'auto', language: 'auto', system: '', key: '', model: '', beside: '', stops: '', think: document.documentElement.dataset.think === '1', docs: true, sampling: {}};
const SAMPLING = {temperature: [0, 2, .1], top_p: [.01, 1, .01], top_k: [0, 1000, 1], min_p: [0, 1, .01], presence_penalty: [-2, 2, .1], frequency_penalty: [-2, 2, .1],
                  repetition_penalty: [.01, 100, .1], max_tokens: [1, 1e6, 1], seed: [0, 2 ** 53 - 1, 1]};

let store;
try {
  store = localStorage;
} catch { // the browser forbids it: then all data lasts as long as the page
  const all = new Map();
  store = {getItem: name => all.get(name) ?? null, setItem: (name, text) => all.set(name, text), removeItem: name => all.delete(name), key: i => [...all.keys()][i],
           get length() { return all.size; }};
}
function parse(text) {
  try { return JSON.parse(text); } catch { return null; }
}
let settings = {...SETTINGS};
{
  const kept = parse(store.getItem(PREFIX + 'settings')) || {};
  for (const name in SETTINGS) if (typeof kept[name] === typeof SETTINGS[name] && kept[name]) settings[name] = kept[name];
  for (const name of ['think', 'docs']) if (typeof kept[name] === 'boolean') settings[name] = kept[name];
}
function keep(key, value) { // false: the store is full, and has what it had before
  try {
    store.setItem(PREFIX + key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
const saveSettings = () => keep('settings', settings) || toast(t('full'));
function hasRoom(text) {
  const room = keep('room', text);
  store.removeItem(PREFIX + 'room');
  return room;
}

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
const string = (x, limit = 1e7) => typeof x === 'string' ? cut(x, limit) : '';
const number = (x, otherwise = 0) => Number.isFinite(x) ? x : otherwise;

// The sources of an answer, read from any content.
const cleanSources = raw => (Array.isArray(raw) ? raw : []).slice(0, 64).filter(s => s && typeof s === 'object').map(s =>
  ({file: string(s.file, 4000), line: number(s.line), heading: string(s.heading, 4000), text: string(s.text, 20000)}));

// The files of a question.
const MOST_FILES = 8, FILE_BYTES = 4e6, DOCUMENT_BYTES = 32 << 20;
const cleanFiles = raw => raw.slice(0, MOST_FILES).filter(f => f && typeof f === 'object').map(f =>
  ({name: string(f.name, 200), text: string(f.text, FILE_BYTES), ...f.long === true && {long: true, tokens: number(f.tokens)}}));

// A conversation read from a file or the store, of any content; null: invalid.
function cleanChat(raw) {
  if (!raw || typeof raw !== 'object') return null;
  const chat = {id: /^[a-z0-9]{1,40}$/.test(string(raw.id)) ? raw.id : newId(), title: string(raw.title, 200), created: number(raw.created, Date.now()),
                updated: number(raw.updated, Date.now()), nodes: [], at: -1};
  const tree = Array.isArray(raw.nodes);
  const list = tree ? raw.nodes : Array.isArray(raw.messages) ? raw.messages.filter(m => m && (m.role === 'user' || m.role === 'assistant')) : [];
  for (const m of list.slice(0, 10000)) {
    if (!m || typeof m !== 'object' || (m.role !== 'user' && m.role !== 'assistant')) return null;
    const n = chat.nodes.length, parent = tree ? m.parent : n - 1;
    if (!Number.isInteger(parent) || parent < -1 || parent >= n) return null;
    const node = {parent, role: m.role, text: string(tree ? m.text : m.content)};
    const thought = string(tree ? m.thought : m.reasoning_content);
    if (thought) node.thought = thought;
    for (const name of ['tokens', 'seconds', 'first', 'mused', 'used', 'beside', 'dropped']) if (Number.isFinite(m[name])) node[name] = m[name];
    if (Array.isArray(m.files) && m.files.length) node.files = cleanFiles(m.files);
    if (Array.isArray(m.sources)) node.sources = cleanSources(m.sources);
    for (const name of ['finish', 'error', 'model']) if (typeof m[name] === 'string') node[name] = m[name].slice(0, 2000);
    chat.nodes.push(node);
  }
  if (!chat.nodes.length) return null;
  chat.nodes.forEach((node, i) => {
    const other = chat.nodes[node.beside];
    if (!other || other === node || other.parent !== node.parent || other.beside !== i) delete node.beside;
  });
  chat.at = Number.isInteger(raw.at) && raw.at >= 0 && raw.at < chat.nodes.length ? raw.at : chat.nodes.length - 1;
  if (!chat.title) chat.title = titleOf(chat.nodes[0].text);
  return chat;
}
function titleOf(text) {
  const line = text.trim().split('\n')[0].trim();
  return line.length > 60 ? cut(line, 59) + '…' : line;
}

const chats = new Map(); // by id
for (let i = 0; i < store.length; i++) {
  const name = store.key(i);
  if (!name.startsWith(PREFIX + 'chat:')) continue;
  const chat = cleanChat(parse(store.getItem(name)));
  if (chat && name === PREFIX + 'chat:' + chat.id) chats.set(chat.id, chat);
}
const unkept = new Set(); // ids of conversations that the store has no room for: they last as long as the page
function saveChat(chat) {
  if (!chats.has(chat.id)) return;
  const kept = keep('chat:' + chat.id, chat);
  if (kept === !unkept.has(chat.id)) return;
  if (kept) unkept.delete(chat.id);
  else unkept.add(chat.id);
  showUnkept();
}
function showUnkept() {
  const here = !!current && unkept.has(current.id);
  $('unkept').classList.toggle('hidden', !here);
  $('unkept').replaceChildren(...here ? [h('span', {}, t('unkept')), h('button', {class: 'plain', type: 'button', onclick: () => exportChats([current], current.title)}, t('exportOne'))] : []);
}
addEventListener('beforeunload', e => { if (unkept.size) e.preventDefault(); });

function pathTo(chat, i) { // from the first message, as indices
  const path = [];
  for (; i >= 0; i = chat.nodes[i].parent) path.push(i);
  return path.reverse();
}
const pathOf = chat => pathTo(chat, chat.at); // the nodes shown
const droppedOf = (chat, path) => Math.max(0, ...path.map(i => chat.nodes[i].dropped || 0)); // so many are no longer read
const siblings = (chat, i) => chat.nodes.map((_, k) => k).filter(k => chat.nodes[k].parent === chat.nodes[i].parent && k !== chat.nodes[i].beside);
function lastLeaf(chat, i) {
  for (;;) {
    const next = chat.nodes.findLastIndex(n => n.parent === i);
    if (next < 0) return i;
    i = next;
  }
}
function addNode(chat, parent, role, text) {
  chat.nodes.push({parent, role, text});
  chat.updated = Date.now();
  return chat.at = chat.nodes.length - 1;
}
