// live.js: events become numbers, a curve and answers. An event is a line of trainer_log.jsonl or trainer_answers.jsonl,
// or one of: about (the run; the first), rate (speed, about once a second), end.
'use strict';
const WORDS = {
  en: {curve: 'Curve', answers: 'Answers', recipe: 'Recipe', loss: 'loss', reward: 'reward', eval: 'evaluation', lr: 'learning rate',
       rate: 'tokens a second', left: 'time left', step: 'step', norm: 'gradient norm', best: 'best', since: t => `${t} since the start`, wanted: 'wanted', before: 'before',
       now: 'now', after: n => `after ${n}`, between: n => `${n} more`, cut: ' … (cut)', empty: '(empty)', begins: 'begins …',
       of: (p, c) => `${p}% of the machine's ceiling, ${c}`, running: 'running', lost: 'The connection is lost. The run has ended, or will be back.'},
  zh: {curve: '曲线', answers: '回答', recipe: '配方', loss: 'loss', reward: '奖励', eval: '验证', lr: '学习率',
       rate: 'token/s', left: '剩余时间', step: '步', norm: '梯度范数', best: '最好', since: t => `已用时 ${t}`, wanted: '参考答案', before: '训练前',
       now: '现在', after: n => `${n} 步后`, between: n => `其余 ${n} 次`, cut: ' …（截断）', empty: '（空）', begins: '即将开始 …',
       of: (p, c) => `本机上限 ${c} 的 ${p}%`, running: '进行中', lost: '连接已断开：训练已结束，或稍后恢复。'},
}[navigator.language.startsWith('zh') ? 'zh' : 'en'];
const $ = id => document.getElementById(id);
function node(tag, props = {}, ...children) {
  const n = Object.assign(document.createElement(tag), props);
  n.append(...children);
  return n;
}
function draw(tag, attributes, text) {
  const n = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const name in attributes) n.setAttribute(name, attributes[name]);
  if (text !== undefined) n.textContent = text;
  return n;
}
const short = x => x === 0 ? '0' : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5 ? String(+x.toPrecision(4)) : x.toExponential(2);
const whole = x => Math.round(x).toLocaleString('en');
const clock = s => `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, '0')}:${String(Math.floor(s) % 60).padStart(2, '0')}`;

let about, steps, evals, rates, speed, asked; // the run; lines of the log; events; answers by question
function begin(event) {
  about = event, steps = [], evals = [], rates = [], speed = null, asked = new Map();
  document.title = event.about;
  $('title').textContent = event.about;
  $('recipe').textContent = [event.command, ...event.facts].join('\n');
  $('state').className = '', $('state').textContent = WORDS.begins;
}

// ---- Drawings
// The points of at most 450 buckets of neighbours, as [step, mean].
function thinned(points) {
  const size = Math.ceil(points.length / 450), out = [];
  for (let i = 0; i < points.length; i += size) {
    const some = points.slice(i, i + size);
    out.push([some[some.length - 1][0], some.reduce((sum, p) => sum + p[1], 0) / some.length]);
  }
  return out;
}
function smooth(points) { // the running mean of loss.svg
  let mean = points.length ? points[0][1] : 0;
  return points.map(([step, y]) => [step, mean += (y - mean) * 0.1]);
}
function sparkline(values) {
  const points = thinned(values.map((y, i) => [i, y])), ys = points.map(p => p[1]);
  const low = Math.min(0, ...ys), high = Math.max(...ys, low + 1e-12), last = Math.max(1, values.length - 1);
  const svg = draw('svg', {viewBox: '0 0 100 22', preserveAspectRatio: 'none'});
  svg.append(draw('polyline', {class: 'mean', points: points.map(([i, y]) => `${100 * i / last},${21 - 20 * (y - low) / (high - low)}`).join(' ')}));
  return svg;
}
const W = 900, H = 320, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 26;
const across = step => LEFT + (W - LEFT - RIGHT) * step / about.total_steps;
function curve() {
  const points = steps.map(s => [s.current_steps, s[about.what]]), dots = evals.map(e => [e.current_steps, e['eval_' + about.what]]);
  const values = [...thinned(points), ...dots].map(p => p[1]);
  const most = Math.max(0, ...values), least = Math.min(0, ...values);
  let tick = 10 ** Math.floor(Math.log10(Math.max(most - least, 1e-9))); // 1, 2 or 5 times a power of ten
  for (const more of [0.5, 0.4, 0.5]) if ((most - least) / tick < 4) tick *= more;
  const low = Math.floor(least / tick) * tick, high = Math.max(low / tick + 1, Math.ceil(most / tick)) * tick;
  const up = y => H - BOTTOM - (H - TOP - BOTTOM) * (y - low) / (high - low);
  const line = list => list.map(([step, y]) => `${across(step).toFixed(1)},${up(y).toFixed(1)}`).join(' ');
  const parts = [];
  for (let i = Math.round(low / tick), y; i <= Math.round(high / tick); i++)
    parts.push(draw('path', {class: 'grid', d: `M${LEFT} ${up(y = i * tick)}H${W - RIGHT}`}), draw('text', {x: LEFT - 6, y: up(y) + 4, 'text-anchor': 'end'}, +y.toPrecision(6)));
  for (let i = 0; i <= 4; i++) {
    const step = Math.floor(about.total_steps * i / 4);
    parts.push(draw('text', {x: across(step), y: H - 6, 'text-anchor': i === 4 ? 'end' : 'middle'}, step));
  }
  parts.push(draw('polyline', {class: 'each', points: line(thinned(points))}), draw('polyline', {class: 'mean', points: line(thinned(smooth(points)))}));
  for (const [step, y] of dots) parts.push(draw('circle', {class: 'dot', r: 4, cx: across(step), cy: up(y)}));
  parts.push(draw('text', {class: 'legend', x: W - RIGHT - 4, y: TOP + 14, 'text-anchor': 'end'}, WORDS[about.what]));
  if (dots.length) parts.push(draw('text', {class: 'legend eval', x: W - RIGHT - 4, y: TOP + 30, 'text-anchor': 'end'}, WORDS.eval));
  $('curve').replaceChildren(...parts);
}
$('curve').onpointermove = event => { // the step below the pointer
  const box = $('curve').getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
  const step = about && Math.round((x - LEFT) / (W - LEFT - RIGHT) * about.total_steps), s = steps.find(s => s.current_steps === step);
  $('at').textContent = s ? `${WORDS.step} ${step}: ${WORDS[about.what]} ${short(s[about.what])}, ${WORDS.lr} ${short(s.lr)}, ${WORDS.norm} ${short(s.grad_norm)}` : '';
};
$('curve').onpointerleave = () => { $('at').textContent = ''; };

// ---- The numbers and the answers
function tile(name, value, more, picture) {
  return node('div', {}, node('span', {textContent: WORDS[name]}), node('b', {textContent: value}), node('small', {textContent: more}), ...(picture ? [picture] : []));
}
function tiles() {
  const s = steps.length && steps[steps.length - 1], key = 'eval_' + about.what, e = evals.length && evals[evals.length - 1];
  const best = Math[about.what === 'reward' ? 'max' : 'min'](...evals.map(e => e[key]));
  const means = smooth(steps.map(s => [s.current_steps, s[about.what]]));
  $('tiles').replaceChildren(
    tile(about.what, s ? short(means[means.length - 1][1]) : '–', s ? `${WORDS.step} ${s.current_steps} / ${about.total_steps}: ${short(s[about.what])}` : ''),
    tile('eval', e ? short(e[key]) : '–', e ? `${WORDS.best} ${short(best)}` : ''),
    tile('lr', s ? short(s.lr) : '–', s ? `${WORDS.norm} ${short(s.grad_norm)}` : '', s && sparkline(steps.map(s => s.lr))),
    tile('rate', speed ? whole(speed.rate) : '–', speed ? WORDS.of((100 * speed.share).toPrecision(2), whole(speed.ceiling)) : '', speed && sparkline(rates)),
    tile('left', speed ? clock(speed.left) : '–', s ? WORDS.since(s.elapsed_time) : ''));
  $('done').max = about.total_steps, $('done').value = s ? s.current_steps : 0;
  if (s && !about.ended) $('state').textContent = `${WORDS.running}: ${s.percentage}%`;
}
const said = a => (a.answer || WORDS.empty) + (a.finish === 'length' ? WORDS.cut : '');
function answers() {
  $('answered').hidden = asked.size === 0;
  const open = new Set([...document.querySelectorAll('details[open]')].map(n => n.dataset.question));
  $('answers').replaceChildren(...[...asked].map(([question, list]) => {
    const row = (word, a, kind = '') => [node('dt', {textContent: word}), node('dd', {textContent: typeof a === 'string' ? a : said(a), className: kind})];
    const name = a => a.current_steps === 0 ? WORDS.before : WORDS.after(a.current_steps);
    const first = list[0], last = list[list.length - 1], between = list.slice(1, -1);
    const card = node('div', {className: 'card answer'}, node('h3', {textContent: question}), node('dl', {},
      ...(first.reference ? row(WORDS.wanted, first.reference) : []), ...row(name(first), first),
      ...(list.length > 1 ? row(about.ended ? name(last) : WORDS.now, last, 'now') : [])));
    if (between.length) {
      const more = node('details', {open: open.has(question)}, node('summary', {textContent: WORDS.between(between.length)}), node('dl', {}, ...between.flatMap(a => row(name(a), a))));
      more.dataset.question = question;
      card.append(more);
    }
    return card;
  }));
}

// ---- Events
let waiting = false, answered = false;
function show() {
  waiting = false;
  tiles(), curve();
  if (answered) answers();
  answered = false;
}
function take(event) {
  if (event.about !== undefined) begin(event), answered = true;
  else if (!about) return;
  else if (event.question !== undefined) {
    if (!asked.has(event.question)) asked.set(event.question, []);
    asked.get(event.question).push(event), answered = true;
  } else if (event.rate !== undefined) speed = event, rates.push(event.rate);
  else if (event.end !== undefined) {
    about.ended = answered = true;
    $('state').textContent = event.end, $('state').className = event.failed ? 'bad' : '';
    source.close();
  } else if (event['eval_' + about.what] !== undefined) evals.push(event);
  else steps.push(event);
  if (!waiting) waiting = true, setTimeout(show, 200);
}
for (const n of document.querySelectorAll('[data-word]')) n.textContent = WORDS[n.dataset.word];
document.documentElement.lang = navigator.language.startsWith('zh') ? 'zh' : 'en';
const dark = matchMedia('(prefers-color-scheme: dark)');
dark.onchange = () => { document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light'; };
dark.onchange();
const source = new EventSource('events');
source.onmessage = event => take(JSON.parse(event.data));
source.onerror = () => { if (!about || !about.ended) $('state').className = 'bad', $('state').textContent = WORDS.lost; };
