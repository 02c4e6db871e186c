// files.js: files that go with a question: dropped, pasted or chosen. The browser reads text, the server converts PDF and
// documents of office programs. The text becomes part of the message. If it is longer than half of the context (`long`), the
// server looks up the passages about each question in it, for as long as the conversation goes on.
let attached = [], reading = []; // {name, text, long}: those of the next question; names of those that are being read
const CONVERTED = /\.(pdf|docx|odt|epub)$/i;

// The content of a message as the model reads it.
function contentOf(node) {
  const fenced = ({name, text}) => {
    let fence = '```';
    while (text.includes(fence)) fence += '`';
    return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
  };
  return [...(node.files || []).filter(file => !file.long).map(fenced), node.text].join('\n\n');
}
const longFiles = (chat, path) => path.flatMap(i => chat.nodes[i].files || []).filter(file => file.long);
const bytesOf = text => new TextEncoder().encode(text).length;

// A file's text; throws the reason why there is none.
async function textOf(file) {
  const start = await file.slice(0, 5).text(); // (a folder cannot be read)
  if (CONVERTED.test(file.name) || start === '%PDF-') {
    if (file.size > DOCUMENT_BYTES) throw t('largeFile', Math.floor(DOCUMENT_BYTES / 1e6));
    const response = await call('convert?name=' + encodeURIComponent(file.name), {method: 'POST', type: 'application/octet-stream', body: file});
    if (response.ok) return string((await response.json()).text);
    const {told} = await refusalOf(response);
    throw messageOf(told.startsWith(file.name + ': ') ? told.slice(file.name.length + 2) : told);
  }
  if (file.size > FILE_BYTES) throw t('largeFile', FILE_BYTES / 1e6);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder('utf-8', {fatal: true}).decode(bytes);
    if (!text.includes('\0')) return text;
  } catch { /* another encoding */ }
  throw t('noText');
}
async function readFile(file) {
  if (attached.length >= MOST_FILES) throw t('manyFiles', MOST_FILES);
  const text = await textOf(file), read = {name: cut(file.name, 200), text};
  if (!text.trim()) throw t('emptyFile');
  if (text.length >= model.limit / 2) { // (a character is rarely more than a token)
    const response = await call('tokenize', {method: 'POST', body: JSON.stringify({prompt: text})});
    const count = response.ok ? (await response.json()).count : 0;
    if (count > model.limit / 2) read.long = true, read.tokens = count;
  }
  const others = [...current ? longFiles(current, pathOf(current)) : [], ...attached.filter(f => f.long)];
  if (read.long && [...others, read].reduce((sum, f) => sum + bytesOf(f.text), 0) > FILE_BYTES) throw t('muchText', FILE_BYTES / 1e6);
  if (!hasRoom([...attached, read].map(f => f.text).join(''))) throw t('noRoom');
  return read;
}
async function attach(files) {
  const wrong = [];
  reading.push(...[...files].map(file => file.name));
  for (const file of files) {
    showFiles();
    try {
      attached.push(await readFile(file));
    } catch (why) {
      wrong.push(`${file.name}: ${typeof why === 'string' ? why : t(why instanceof DOMException ? 'unreadable' : 'offline')}`);
    }
    reading.splice(reading.indexOf(file.name), 1);
  }
  if (wrong.length) toast(wrong.join('\n'));
  showFiles();
  $('input').focus();
}
const searchedNode = file => file.long ? h('small', {title: t('searchedHelp')}, t('searched', number(file.tokens).toLocaleString())) : '';
function showFiles() {
  $('files').replaceChildren(...attached.map(file => h('span', {class: 'file'}, icon('page', 15), file.name, searchedNode(file),
    h('button', {type: 'button', title: t('removeFile'), 'aria-label': `${t('removeFile')}: ${file.name}`,
                 onclick: () => { attached = attached.filter(f => f !== file); showFiles(); }}, icon('close', 13)))),
    ...reading.map(name => h('span', {class: 'file', role: 'status'}, bars(), name)));
  showComposer();
}
const filesNode = files => h('div', {class: 'files'}, files.map(file =>
  h('details', {class: 'file'}, h('summary', {}, icon('page', 15), file.name, searchedNode(file)), h('pre', {dir: 'auto', tabindex: 0}, file.text))));

$('attach').onclick = () => {
  const input = h('input', {type: 'file', multiple: true, onchange: () => attach(input.files)});
  input.click();
};
$('input').addEventListener('paste', e => {
  if (e.clipboardData.files.length && !e.clipboardData.types.includes('text/plain')) e.preventDefault(), attach([...e.clipboardData.files]);
});
const hasFiles = e => e.dataTransfer && e.dataTransfer.types.includes('Files');
document.addEventListener('dragover', e => { if (hasFiles(e)) e.preventDefault(), $('composer').classList.add('dropping'); });
document.addEventListener('dragleave', e => { if (!e.relatedTarget) $('composer').classList.remove('dropping'); });
document.addEventListener('drop', e => {
  if (!hasFiles(e)) return;
  e.preventDefault();
  $('composer').classList.remove('dropping');
  attach([...e.dataTransfer.files]);
});
