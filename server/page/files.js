// files.js: text files that go with a question: dropped, pasted or chosen. The browser reads them, and their text becomes
// part of the message.
let attached = []; // {name, text}: those of the next question

// The content of a message as the model reads it.
function contentOf(node) {
  const fenced = ({name, text}) => {
    let fence = '```';
    while (text.includes(fence)) fence += '`';
    return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
  };
  return [...(node.files || []).map(fenced), node.text].join('\n\n');
}

// A file's text; throws the reason why there is none.
async function readFile(file) {
  if (attached.length >= MOST_FILES) throw t('manyFiles', MOST_FILES);
  if (file.size > FILE_BYTES) throw t('largeFile', FILE_BYTES / 1e6);
  let text;
  try {
    text = new TextDecoder('utf-8', {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw t('noText');
  }
  if (text.includes('\0') || text.startsWith('%PDF-')) throw t('noText');
  if (!text.trim()) throw t('emptyFile');
  if (text.length < model.limit / 2) return text; // (a character is rarely more than a token)
  const response = await call('tokenize', {method: 'POST', body: JSON.stringify({prompt: text})});
  const count = response.ok ? (await response.json()).count : 0;
  if (count > model.limit / 2) throw t('longFile', count.toLocaleString(), Math.floor(model.limit / 2).toLocaleString());
  return text;
}
async function attach(files) {
  const wrong = [];
  for (const file of files) {
    try {
      attached.push({name: file.name, text: await readFile(file)});
    } catch (why) {
      wrong.push(`${file.name}: ${typeof why === 'string' ? why : t('offline')}`);
    }
  }
  if (wrong.length) toast(wrong.join('\n'));
  showFiles();
  $('input').focus();
}
function showFiles() {
  $('files').replaceChildren(...attached.map(file => h('span', {class: 'file'}, icon('page', 15), file.name,
    h('button', {type: 'button', title: t('removeFile'), 'aria-label': `${t('removeFile')}: ${file.name}`,
                 onclick: () => { attached = attached.filter(f => f !== file); showFiles(); }}, icon('close', 13)))));
}
const filesNode = files => h('div', {class: 'files'}, files.map(file =>
  h('details', {class: 'file'}, h('summary', {}, icon('page', 15), file.name), h('pre', {dir: 'auto', tabindex: 0}, file.text))));

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
