// math.js: formulas. Temml, which the server has beside the page, turns TeX into MathML. It is loaded when the first
// formula appears. Until then, and if it refuses a formula, the TeX itself is shown.
const MATH_LENGTH = 2000, MATH_DEPTH = 50, MATH_NODES = 5000, MATH_KEPT = 1000;
const MACRO = /\\(?:[gex]?def|let|futurelet|(?:re|provide)?newcommand|renewcommand|providecommand)(?![a-zA-Z])/;
const MATHML = 'http://www.w3.org/1998/Math/MathML';
const TEMML = window.trustedTypes // the only address that a script may be loaded from
  ? trustedTypes.createPolicy('math', {createScriptURL: () => 'temml.js'}).createScriptURL('') : 'temml.js';
const NONCE = document.currentScript.nonce;
const drawnFormulas = new Map(); // by TeX and size; null: refused
let waitingFormulas = [], temmlState = ''; // asked; failed

function formula(tag, tex, display) {
  const node = h(tag, {class: display ? 'math display' : 'math'}, tex);
  if (window.temml) drawFormula(node, tex, display);
  else if (temmlState !== 'failed') waitingFormulas.push([node, tex, display]), loadTemml();
  return node;
}
function loadTemml() {
  if (temmlState) return;
  temmlState = 'asked';
  const script = h('script', {onload: () => {
    for (const [node, tex, display] of waitingFormulas) drawFormula(node, tex, display);
    waitingFormulas = [];
    toEnd();
  }, onerror: () => {
    waitingFormulas = [];
    temmlState = 'failed'; // until the next visit
  }});
  script.nonce = NONCE;
  script.src = TEMML;
  document.head.append(script);
}
function drawFormula(node, tex, display) {
  const key = display + tex;
  if (!drawnFormulas.has(key)) {
    if (drawnFormulas.size >= MATH_KEPT) drawnFormulas.clear();
    drawnFormulas.set(key, mathOf(tex, display));
  }
  const math = drawnFormulas.get(key);
  if (math) node.title = tex, node.replaceChildren(math.cloneNode(true));
}
function mathOf(tex, display) {
  if (tex.length > MATH_LENGTH || MACRO.test(tex)) return null; // (macros make a page of any length of few letters)
  const holder = document.createElement('span');
  try {
    temml.render(tex, holder, {displayMode: display, throwOnError: true, maxExpand: 200, maxSize: [40, 400]});
  } catch { // a fault of the TeX, or deeper than the stack
    return null;
  }
  const math = holder.firstElementChild;
  const few = holder.getElementsByTagName('*').length <= MATH_NODES;
  return math && few && holder.childElementCount === 1 && isPlainMath(math, 0) ? math : null;
}
// Whether a tree has MathML and spans only, without links, and is not too deep to be laid out. Names (\label) are removed:
// the page's own elements are found by theirs.
function isPlainMath(node, depth) {
  const known = node.namespaceURI === MATHML || node.tagName === 'SPAN';
  if (!known || node.hasAttribute('href') || depth > MATH_DEPTH) return false;
  node.removeAttribute('id');
  return [...node.children].every(child => isPlainMath(child, depth + 1));
}
