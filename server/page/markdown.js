// markdown.js: the Markdown that models write, as DOM nodes: blocks line by line, then the inside of lines. Time is linear
// in the text.
const DEPTH = 12; // nesting of lists and quotes
const OPEN = 50;  // unclosed delimiters in a paragraph
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/, HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s, RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/, COLUMNS = /^ *\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const blank = line => !line.trim();
function headingOf(text) { // without the closing #s
  text = text.trimEnd();
  let n = text.length;
  while (text[n - 1] === '#') n--;
  return n === 0 || /\s/.test(text[n - 1]) ? text.slice(0, n).trimEnd() : text;
}
const indent = line => line.length - line.trimStart().length;
const startsTable = (lines, i) => i + 1 < lines.length && lines[i].includes('|') && lines[i + 1].includes('|') && lines[i + 1].length < 5000 && COLUMNS.test(lines[i + 1]);
const startsBlock = (lines, i) => FENCE.test(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i]) ||
                                  /^ {0,3}([-*+]|1[.)]) +\S/.test(lines[i]) || /^ *(\$\$|\\\[)/.test(lines[i]) || startsTable(lines, i);

// [{kind, from, to, ...}]: lines `from` to before `to`.
function blocksOf(lines) {
  const all = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i], from = i;
    let m;
    if (blank(line)) { i++; continue; }
    if ((m = FENCE.exec(line))) {
      const end = new RegExp(`^ {0,3}${m[1][0]}{${Math.min(m[1].length, 1000)},}[ \\t]*$`);
      for (i++; i < lines.length && !end.test(lines[i]);) i++;
      const closed = i < lines.length;
      all.push({kind: 'code', from, to: i += closed, closed, language: m[2].trim().split(/\s/)[0], shift: indent(line)});
    } else if ((m = HEADING.exec(line))) {
      all.push({kind: 'heading', from, to: ++i, level: m[1].length, text: headingOf(m[2])});
    } else if (RULE.test(line)) {
      all.push({kind: 'rule', from, to: ++i});
    } else if ((m = /^ *(\$\$|\\\[)/.exec(line))) {
      const close = m[1] === '$$' ? '$$' : '\\]', closeAt = k => lines[k].indexOf(close, k === from ? m[0].length : 0);
      while (i < lines.length && closeAt(i) < 0 && !(i > from && blank(lines[i]))) i++; // (TeX has no blank line in it)
      const closed = i < lines.length && closeAt(i) >= 0, alone = closed && blank(lines[i].slice(closeAt(i) + 2));
      const open = i === lines.length; // it may still come
      all.push({kind: alone || open ? 'math' : 'text', from, to: i = Math.min(i + closed, lines.length), closed});
    } else if (startsTable(lines, i)) {
      for (i += 2; i < lines.length && !blank(lines[i]) && lines[i].includes('|');) i++;
      all.push({kind: 'table', from, to: i});
    } else if (QUOTE.test(line)) {
      while (i < lines.length && !blank(lines[i]) && (QUOTE.test(lines[i]) || !startsBlock(lines, i))) i++;
      all.push({kind: 'quote', from, to: i});
    } else if (ITEM.test(line)) {
      all.push(listAt(lines, i));
      i = all.at(-1).to;
    } else {
      for (i++; i < lines.length && !blank(lines[i]) && !startsBlock(lines, i);) i++;
      all.push({kind: 'text', from, to: i});
    }
  }
  return all;
}

function listAt(lines, from) {
  const first = ITEM.exec(lines[from]), ordered = first[2].length > 1, base = first[1].length;
  const items = [];
  let loose = false, offset = 0, i = from;
  for (; i < lines.length; i++) {
    const line = lines[i], depth = indent(line), before = i > from && blank(lines[i - 1]);
    if (blank(line)) { if (items.length) items.at(-1).push(''); continue; }
    const m = RULE.test(line) ? null : ITEM.exec(line);
    if (m && (items.length === 0 || depth < base + 2) && m[2].length > 1 === ordered) {
      loose = loose || (before && items.length > 0);
      offset = Math.min(m[0].length, depth + m[2].length + 4);
      items.push([line.slice(offset)]);
    } else if (m ? depth >= base + 2 : depth >= Math.min(offset, base + 2) || (!before && !startsBlock(lines, i))) {
      items.at(-1).push(line.slice(Math.min(depth, offset)));
    } else {
      break;
    }
  }
  while (blank(lines[i - 1])) i--;
  return {kind: 'list', from, to: i, ordered, loose, items, start: parseInt(first[2])};
}

function makeBlock(block, lines, depth) {
  const own = lines.slice(block.from, block.to);
  switch (block.kind) {
  case 'heading': return h('h' + block.level, {dir: 'auto'}, inline(block.text));
  case 'rule': return h('hr');
  case 'math': {
    const tex = own.join('\n').trim().slice(2, block.closed ? -2 : undefined).trim();
    return block.closed ? formula('div', tex, true) : h('div', {class: 'math'}, tex);
  }
  case 'quote': return h('blockquote', {dir: 'auto'}, makeBlocks(own.map(l => l.replace(QUOTE, '')), depth + 1));
  case 'table': return makeTable(own);
  case 'code': {
    const view = new CodeView(block.language);
    view.set(codeOf(block, own), true);
    return view.node;
  }
  case 'list': return h(block.ordered ? 'ol' : 'ul', {start: block.ordered && block.start !== 1 && block.start, dir: 'auto'}, block.items.map(item => {
    const m = /^\[([ xX])\] +/.exec(item[0]);
    if (m) item[0] = item[0].slice(m[0].length);
    const node = h('li', {class: m && 'task'});
    if (m) node.append(h('input', {type: 'checkbox', disabled: true, checked: m[1] !== ' '}));
    for (const child of makeBlocks(item, depth + 1))
      if (!block.loose && child.tagName === 'P') for (const inner of [...child.childNodes]) node.append(inner);
      else node.append(child);
    return node;
  }));
  }
  return h('p', {dir: 'auto'}, inline(own.map(l => l.trimStart()).join('\n').trimEnd()));
}
function makeBlocks(lines, depth) {
  if (depth > DEPTH) return [h('p', {}, lines.join('\n'))];
  return blocksOf(lines).map(b => makeBlock(b, lines, depth));
}
const codeOf = (block, own) => own.slice(1, block.closed ? -1 : undefined).map(l => l.slice(Math.min(block.shift, indent(l)))).join('\n');

function cellsOf(line) {
  const cells = [''];
  let code = false;
  const inner = line.trim().replace(/^\|/, '');
  for (let i = 0; i < inner.length; i++) {
    if (inner[i] === '`') code = !code;
    if (inner[i] === '\\' && inner[i + 1] === '|') cells[cells.length - 1] += inner[++i];
    else if (inner[i] === '|' && !(code && inner.indexOf('`', i) > 0)) cells.push('');
    else cells[cells.length - 1] += inner[i];
  }
  if (blank(cells.at(-1)) && cells.length > 1) cells.pop();
  return cells.map(c => c.trim());
}
function makeTable(lines) {
  const sides = cellsOf(lines[1]).map(c => /^:.*:$/.test(c) ? 'center' : c.endsWith(':') ? 'right' : null);
  const row = (line, tag) => {
    const cells = cellsOf(line), wanted = sides.slice(0, Math.max(cells.length, 20)); // many columns of many short rows are too many
    return h('tr', {}, wanted.map((side, k) => h(tag, {class: side, dir: 'auto'}, inline(cells[k] || ''))));
  };
  return h('div', {class: 'table', tabindex: 0}, h('table', {}, h('thead', {}, row(lines[0], 'th')), h('tbody', {}, lines.slice(2).map(l => row(l, 'td')))));
}

const ENTITIES = {amp: '&', lt: '<', gt: '>', quot: '"', nbsp: '\u00a0', '#39': '\''};
const SPECIAL = /[\\`*_~[\]!<$&\nh]/g;
const TAG = {'*1': 'em', '*2': 'strong', '_1': 'em', '_2': 'strong', '~2': 'del'};

// The nodes of a line, or of lines. Delimiters that may open something wait on a stack of places in `out`.
function inline(text) {
  const out = [], open = [], waiting = {}, never = new Set();
  let plain = '';
  const flush = () => { if (plain) out.push(document.createTextNode(plain)), plain = ''; };
  const add = node => { flush(); out.push(node); };
  const wait = (mark, size, shown) => {
    flush();
    if (open.length >= OPEN) return void (plain += shown);
    open.push({mark, size, at: out.length});
    waiting[mark] = (waiting[mark] || 0) + 1;
    out.push(document.createTextNode(shown));
  };
  const close = (k, tag, props) => { // the nodes since the k-th opening delimiter become one node
    flush();
    const at = open[k].at;
    for (const o of open.splice(k)) waiting[o.mark]--;
    out.push(h(tag, props, out.splice(at).slice(1)));
  };
  const find = (what, from) => { // the next occurrence; a failed search is not repeated
    if (never.has(what)) return -1;
    const at = text.indexOf(what, from);
    if (at < 0) never.add(what);
    return at;
  };
  const delimiters = (c, n, i) => {
    const before = text[i - 1] || ' ', after = text[i + n] || ' ', word = /[\p{L}\p{N}]/u;
    const opens = !/\s/.test(after) && !(c === '_' && word.test(before)), closes = !/\s/.test(before) && !(c === '_' && word.test(after));
    while (closes && n > 0 && waiting[c] > 0) {
      const k = open.findLastIndex(o => o.mark === c && o.size <= n);
      if (k < 0 || (open[k].at === out.length - 1 && !plain)) break;
      n -= open[k].size;
      close(k, TAG[c + open[k].size], {});
    }
    for (; n > 0; n -= n > 1 ? 2 : 1) {
      const size = n > 1 ? 2 : 1;
      if (opens && TAG[c + size]) wait(c, size, c.repeat(size));
      else plain += c.repeat(size);
    }
  };
  let i = 0;
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text);
    if (!next) { plain += text.slice(i); break; }
    plain += text.slice(i, next.index);
    i = next.index;
    const c = text[i];
    let m;
    if (c === '\n') {
      add(h('br'));
      i++;
    } else if (c === '\\') {
      const end = text[i + 1] === '(' ? find('\\)', i) : text[i + 1] === '[' ? find('\\]', i) : -1;
      if (end > 0) add(formula('span', text.slice(i + 2, end).trim(), text[i + 1] === '[')), i = end + 2;
      else if (/[!-/:-@[-`{-~]/.test(text[i + 1] || '')) plain += text[i + 1], i += 2;
      else plain += c, i++;
    } else if (c === '`') {
      let n = 1;
      while (text[i + n] === '`') n++;
      let end = i + n;
      const fence = '`'.repeat(n);
      while ((end = find(fence, end)) >= 0 && (text[end + n] === '`' || text[end - 1] === '`')) for (end++; text[end] === '`';) end++;
      if (end < 0 || n > 100) never.add(fence), plain += fence, i += n;
      else {
        const code = text.slice(i + n, end).replace(/\n/g, ' '), padded = code[0] === ' ' && code.at(-1) === ' ' && /[^ ]/.test(code);
        add(h('code', {}, padded ? code.slice(1, -1) : code));
        i = end + n;
      }
    } else if (c === '*' || c === '_' || c === '~') {
      let n = 1;
      while (text[i + n] === c) n++;
      if (n > 3) plain += c.repeat(n);
      else delimiters(c, n, i);
      i += n;
    } else if (c === '[' || (c === '!' && text[i + 1] === '[')) {
      const n = c === '!' ? 2 : 1;
      wait('[', n, c === '!' ? '![' : '[');
      i += n;
    } else if (c === ']') {
      const k = waiting['['] > 0 ? open.findLastIndex(o => o.mark === '[') : -1;
      LINK.lastIndex = i + 1;
      m = k >= 0 && LINK.exec(text);
      if (m && safe(m[1])) close(k, 'a', linkTo(m[1])), i = LINK.lastIndex;
      else {
        if (k >= 0) open.splice(k, 1), waiting['[']--;
        plain += c, i++;
      }
    } else if (c === '<' && (BREAK.lastIndex = i, m = BREAK.exec(text))) {
      add(h('br'));
      i = BREAK.lastIndex;
    } else if (c === '<' && (AUTO.lastIndex = i, m = AUTO.exec(text))) {
      add(h('a', linkTo(m[1]), m[1]));
      i = AUTO.lastIndex;
    } else if (c === '$' && text[i + 1] === '$' && find('$$', i + 2) > i + 2) {
      const end = find('$$', i + 2);
      add(formula('span', text.slice(i + 2, end).trim(), true));
      i = end + 2;
    } else if (c === '$' && /[^\s$]/.test(text[i + 1] || '')) {
      const end = find('$', i + 1);
      if (end > 0 && !/\s/.test(text[end - 1]) && !/\d/.test(text[end + 1] || '') && text.slice(i, end).length < 300)
        add(formula('span', text.slice(i + 1, end), false)), i = end + 1;
      else plain += c, i++;
    } else if (c === '&' && (m = /^&([a-z]{2,4}|#39);/.exec(text.slice(i, i + 6))) && ENTITIES[m[1]]) {
      plain += ENTITIES[m[1]];
      i += m[0].length;
    } else if (c === 'h' && !/[A-Za-z0-9]/.test(text[i - 1] || '') && (BARE.lastIndex = i, m = BARE.exec(text)) && waiting['['] !== 1) {
      const url = m[0].replace(/[.,;:!?'*_~]+$/, '');
      add(h('a', linkTo(url), url));
      i += url.length;
    } else {
      plain += c;
      i++;
    }
  }
  flush();
  return out;
}
const LINK = /\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s+(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?\s*\)/y;
const BREAK = /<br ?\/?>/iy, AUTO = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>()[\]{}"'`|，。；！？、（）《》「」“”]{2,2000}/y;
const safe = url => /^(https?:\/\/|mailto:)/i.test(url);
const linkTo = url => ({href: url, target: '_blank', rel: 'noopener noreferrer nofollow', title: url});

// Growing Markdown: only its last two blocks are rebuilt, and of code only new lines.
class MarkdownView {
  constructor() {
    this.node = h('div', {class: 'md'});
    this.parts = []; // {source, at, node, code}
    this.text = '';
  }
  set(text, done) {
    if (!text.startsWith(this.text)) this.parts = [], this.node.replaceChildren();
    this.text = text;
    const first = Math.max(0, this.parts.length - 2), start = first < this.parts.length ? this.parts[first].at : 0;
    const lines = text.slice(start).replace(/\t/g, '    ').split('\n'), raw = text.slice(start).split('\n');
    let at = start, line = 0, k = first;
    for (const block of blocksOf(lines)) {
      for (; line < block.from; line++) at += raw[line].length + 1;
      const source = raw.slice(block.from, block.to).join('\n'), old = this.parts[k];
      const part = {source, at, node: null, code: null};
      if (block.kind === 'code') {
        const head = old && old.code && old.at === at && old.code.language === block.language;
        part.code = head ? old.code : new CodeView(block.language);
        part.node = part.code.node;
        part.code.set(codeOf(block, raw.slice(block.from, block.to)), block.closed || done);
      } else if (old && old.at === at && old.source === source && !old.code) {
        part.node = old.node;
      } else {
        part.node = makeBlock(block, lines, 0);
      }
      if (!old) this.node.append(part.node);
      else if (old.node !== part.node) old.node.replaceWith(part.node);
      this.parts[k++] = part;
    }
    for (const old of this.parts.splice(k)) old.node.remove();
  }
}
