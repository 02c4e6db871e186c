// code.js: code blocks with coloured words.
const C_WORDS = 'alignas alignof and asm async auto await bool break case catch char class co_await const constexpr continue debugger decltype default defer delete do double ' +
  'dynamic_cast else enum explicit export extends extern extends final finally float fn for func function goto go if impl implements import in inline instanceof int interface ' +
  'let long match mod move mut namespace new noexcept null nullptr operator or override package private protected pub public readonly ref register reinterpret_cast return self ' +
  'short signed size_t sizeof static static_assert static_cast struct super switch template this throw trait true false try type typedef typeid typename typeof union unsigned ' +
  'use using var virtual void volatile where while yield undefined String __global__ __device__ __host__ __shared__ __constant__ __restrict__ __launch_bounds__ half float2 ' +
  'float4 dim3 uint32_t int32_t uint64_t int64_t uint8_t int8_t uint16_t int16_t';
const FAMILIES = {
  c: {words: C_WORDS, line: '//', block: ['/*', '*/'], quotes: '"\'`'},
  py: {words: 'and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self',
       line: '#', block: ['"""', '"""'], quotes: '"\''},
  sh: {words: 'if then else elif fi for in do done while until case esac function return export local set unset echo cd sudo exit source true false', line: '#', quotes: '"\''},
  sql: {words: 'select from where insert into values update set delete create table drop alter index view join left right inner outer on group by order having limit and or not null is in as distinct union all primary key foreign references',
        line: '--', block: ['/*', '*/'], quotes: '\'"', any: true},
  data: {words: 'true false null yes no on off', line: '#', quotes: '"\''},
};
const LANGUAGES = {python: 'py', py: 'py', bash: 'sh', sh: 'sh', shell: 'sh', zsh: 'sh', console: 'sh', sql: 'sql', json: 'data', jsonl: 'data', yaml: 'data', yml: 'data', toml: 'data', ini: 'data', makefile: 'sh', dockerfile: 'sh'};
for (const name of 'c cc cpp c++ h hpp cu cuda cuh java js javascript jsx ts typescript tsx go rust rs csharp cs kotlin swift php scala glsl hlsl opencl ptx css'.split(' ')) LANGUAGES[name] = 'c';
for (const family of Object.values(FAMILIES)) family.set = new Set(family.words.split(' '));

// A line as [class, text] pairs; `inside`: it begins inside a block comment. Returns whether the next line does.
function colour(line, family, inside, put) {
  const [begin, end] = family.block || [];
  const token = /[A-Za-z_$@#][\w$]*|\d[\w.]*|\s+|./gsu;
  let i = 0;
  while (i < line.length) {
    if (inside) {
      const at = line.indexOf(end, i), to = at < 0 ? line.length : at + end.length;
      put('c', line.slice(i, to));
      i = to;
      if (at < 0) return true;
      inside = false;
    } else if (begin && line.startsWith(begin, i)) {
      put('c', begin);
      i += begin.length;
      inside = true;
    } else if (line.startsWith(family.line, i) && (family.line !== '#' || i === 0 || /\s/.test(line[i - 1]))) {
      put('c', line.slice(i));
      return false;
    } else if (family.quotes.includes(line[i])) {
      let to = i + 1;
      while (to < line.length && line[to] !== line[i]) to += line[to] === '\\' ? 2 : 1;
      put('s', line.slice(i, to + 1));
      i = to + 1;
    } else {
      token.lastIndex = i;
      const word = token.exec(line)[0];
      i += word.length;
      const known = family.set.has(family.any ? word.toLowerCase() : word) || (family === FAMILIES.c && word[0] === '#') || (family === FAMILIES.py && word[0] === '@');
      put(known ? 'w' : /^\d/.test(word) ? 'n' : /^\w/.test(word) && line[i] === '(' ? 'f' : '', word);
    }
  }
  return inside;
}

class CodeView { // grows line by line
  constructor(language) {
    this.language = language;
    this.family = FAMILIES[LANGUAGES[language.toLowerCase()]];
    this.text = '';
    this.done = 0; // characters already coloured
    this.inside = false;
    this.tail = document.createTextNode('');
    this.code = h('code', {}, this.tail);
    const button = h('button', {type: 'button', onclick: () => copy(this.text, button)}, icon('copy', 15), t('copy'));
    this.node = h('div', {class: 'block', dir: 'ltr'}, h('div', {class: 'bar'}, h('span', {}, language || 'text'), button), h('pre', {tabindex: 0}, this.code));
  }
  set(text, whole) {
    if (!text.startsWith(this.text.slice(0, this.done))) this.done = 0, this.inside = false, this.code.replaceChildren(this.tail);
    this.text = text;
    const end = whole ? text.length : text.lastIndexOf('\n') + 1;
    if (end > this.done) {
      const fresh = document.createDocumentFragment();
      let plain = '';
      const flush = () => { if (plain) fresh.append(plain), plain = ''; };
      for (const line of text.slice(this.done, end).split(/(?<=\n)/)) {
        if (!this.family || line.length > 2000) plain += line;
        else this.inside = colour(line, this.family, this.inside, (kind, word) => {
          if (!kind) plain += word;
          else flush(), fresh.append(h('span', {class: kind}, word));
        });
      }
      flush();
      this.code.insertBefore(fresh, this.tail);
      this.done = end;
    }
    this.tail.data = text.slice(this.done);
  }
}
