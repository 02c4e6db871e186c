// nodes.js: DOM nodes, icons, a short message, the clipboard.
const $ = id => document.getElementById(id);
const TITLE = document.title;
const cut = (text, limit) => text.slice(0, limit).replace(/[\ud800-\udbff]$/, ''); // not within a pair of surrogates

function h(tag, props, ...children) { // on*: listeners; all else: attributes. A child may be a list of them.
  const node = document.createElement(tag);
  for (const child of children.flat()) node.append(child); // before dir=auto, which looks at all children each time
  for (const [name, value] of Object.entries(props || {}))
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? '' : value);
  return node;
}

const ICONS = { // of 24 x 24
  menu: 'M4 6h16M4 12h16M4 18h10', add: 'M12 5v14M5 12h14', send: 'M12 19V5M5 12l7-7 7 7', stop: 'M7 7h10v10H7z',
  copy: 'M9 9h11v11H9zM15 9V4H4v11h5', done: 'M5 13l4 4L19 7', edit: 'M4 20h4L19 9l-4-4L4 16zM13 7l4 4', again: 'M20 11a8 8 0 1 0-2 6M20 4v7h-7',
  bin: 'M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3', down: 'M12 5v14M5 12l7 7 7-7', left: 'M14 6l-6 6 6 6', right: 'M10 6l6 6-6 6',
  gear: 'M4 7h9M19 7h1M4 17h1M11 17h9M13 7a3 3 0 1 0 6 0a3 3 0 1 0-6 0M5 17a3 3 0 1 0 6 0a3 3 0 1 0-6 0', close: 'M6 6l12 12M18 6L6 18',
  sun: 'M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19',
  moon: 'M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z',
  book: 'M5 4h11a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM5 17a3 3 0 0 1 3-3h11',
  bulb: 'M9 18h6M10 21h4M12 3a6 6 0 0 0-3.5 10.9V16h7v-2.1A6 6 0 0 0 12 3z',
  beside: 'M4 5h7v14H4zM14 5h6v14h-6z', chart: 'M5 20v-6M10 20V4M15 20v-9M20 20v-4', page: 'M6 3h8l4 4v14H6zM14 3v4h4', clip: 'M19 11l-7.5 7.5a4.6 4.6 0 0 1-6.5-6.5L13 4a3 3 0 0 1 4.3 4.3L9.5 16a1.4 1.4 0 0 1-2-2L14 7.5', code: 'M8 7l-5 5 5 5M16 7l5 5-5 5', table: 'M4 5h16v14H4zM4 10h16M10 5v14',
};
function svg(size, box, ...parts) {
  const make = (tag, props) => {
    const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
    return node;
  };
  const root = make('svg', {width: size, height: size, viewBox: `0 0 ${box} ${box}`, fill: 'none', 'aria-hidden': 'true',
                            'stroke-linecap': 'round', 'stroke-linejoin': 'round'});
  root.append(...parts.map(([tag, props]) => make(tag, props)));
  return root;
}
const icon = (name, size = 18) => svg(size, 24, ['path', {d: ICONS[name], stroke: 'currentColor', 'stroke-width': 1.8}]);
function logo(size) { // the threads of a warp
  const threads = [['M6 8v9', .75], ['M11 13v11', 1], ['M16 9v10', 1], ['M21 13v11', 1], ['M26 8v9', .75]];
  const node = svg(size, 32, ['rect', {width: 32, height: 32, rx: 8, fill: '#0f766e'}],
    ...threads.map(([d, opacity]) => ['path', {d, stroke: '#fff', 'stroke-width': 2.6, opacity}]));
  node.setAttribute('class', 'logo');
  return node;
}
const bars = () => h('span', {class: 'bars'}, h('i'), h('i'), h('i'), h('i'), h('i'));

let toastTimer;
function toast(text, action, act) {
  clearTimeout(toastTimer);
  $('toast').replaceChildren(h('span', {}, text));
  if (action) $('toast').append(h('button', {type: 'button', onclick: () => { $('toast').classList.add('hidden'); act(); }}, action));
  $('toast').classList.remove('hidden');
  toastTimer = setTimeout(() => $('toast').classList.add('hidden'), action || text.length > 60 ? 8000 : 3000);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not over plain HTTP from another machine
    const area = h('textarea', {readonly: true});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon('done', 16), ...(before.length > 1 ? [t('copied')] : []));
  setTimeout(() => button.replaceChildren(...before), 1400);
}
