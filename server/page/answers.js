// answers.js: requests to the server, and their answers.
const NO_MODEL = {name: '', limit: 0, parent: ''};
let models = [];      // of /v1/models
let model = NO_MODEL; // the one that answers
const modelCalled = name => models.find(m => m.name === name);
const modelOf = node => modelCalled(node.model) || model; // the one that gave an answer, if it is still there
const besideModel = () => settings.beside !== model.name && modelCalled(settings.beside) || null;

async function call(path, options = {}) {
  const headers = {};
  if (settings.key) headers.Authorization = 'Bearer ' + settings.key;
  if (options.body) headers['Content-Type'] = options.type || 'application/json';
  return fetch(path, {...options, headers, cache: 'no-store', credentials: 'same-origin'});
}

// A question, as a new branch behind `parent`, and its answer, or two of them.
function ask(chat, parent, text, files = []) {
  const question = addNode(chat, parent, 'user', text), other = besideModel();
  if (files.length) chat.nodes[question].files = files;
  if (!chat.title) chat.title = titleOf(text);
  chats.set(chat.id, chat);
  stick = true;
  const first = addNode(chat, question, 'assistant', '');
  if (other) {
    const second = addNode(chat, question, 'assistant', '');
    chat.nodes[first].beside = second, chat.nodes[second].beside = first;
    chat.at = first;
    answer(chat, second, other.name);
  }
  answer(chat, first, model.name);
}
function answerAgain(chat, index) { // an error leaves no branch
  if (live.has(chat.id)) return;
  const node = chat.nodes[index], failed = node.error && !node.text;
  stick = true;
  answer(chat, failed ? index : addNode(chat, node.parent, 'assistant', ''), failed ? modelOf(node).name : model.name);
}
function proceed(chat, index) {
  if (!live.has(chat.id)) answer(chat, index, modelOf(chat.nodes[index]).name);
}

// If the node has a text already, the model continues it.
async function answer(chat, index, name) {
  const node = chat.nodes[index], onward = !!node.text, before = {tokens: node.tokens || 0, seconds: onward ? node.seconds - node.first || 0 : 0};
  delete node.error, delete node.finish;
  if (!onward) delete node.thought;
  if (name) node.model = name;
  const going = {index, stop: new AbortController(), start: performance.now(), dirty: false, tokens: 0, first: 0, stopped: false};
  live.set(chat.id, [...live.get(chat.id) || [], going]);
  showChat(chat);
  const saving = setInterval(() => saveChat(chat), 1000);
  const count = tokens => {
    const now = performance.now();
    node.tokens = before.tokens + tokens;
    node.first = going.first ? (going.first - going.start) / 1000 : 0;
    node.seconds = before.seconds + (now - going.start) / 1000;
  };
  try {
    const request = requestFor(chat, index, onward), {limit} = modelOf(node);
    let response;
    for (let full = false;; full = true) {
      await makeRoom(chat, index, request, limit, full, going.stop.signal);
      response = await call('v1/chat/completions', {method: 'POST', body: JSON.stringify(request), signal: going.stop.signal});
      if (response.ok) break;
      const refusal = await refusalOf(response);
      if (refusal.told !== 'tooLong' || full) throw refusal;
      delete request.max_tokens; // it may exceed the remaining room, which then is the limit
    }
    for await (const data of eventsOf(response.body)) {
      if (data === '[DONE]') { going.done = true; break; }
      const event = JSON.parse(data);
      if (event.error) throw {told: string(event.error.message)};
      if (event.sources && !onward) node.sources = cleanSources(event.sources);
      if (event.usage) count(event.usage.completion_tokens), node.used = event.usage.total_tokens;
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      const text = string(choice.delta.content), thought = string(choice.delta.reasoning_content);
      if (choice.finish_reason) node.finish = choice.finish_reason;
      else if (choice.delta.role === undefined) {
        if (!going.first) going.first = performance.now();
        count(++going.tokens);
      }
      if (text && node.thought && !node.text) node.mused = (performance.now() - going.first) / 1000;
      if (thought) node.thought = (node.thought || '') + thought;
      node.text += text;
      redraw(chat, going);
    }
    if (!going.done) node.finish = 'broken';
  } catch (fault) {
    if (going.stopped) node.finish = 'stopped';
    else if (fault.told) node.error = fault.told;
    else if (node.text || node.thought) node.finish = 'broken';
    else node.error = 'offline', checkServer();
  }
  clearInterval(saving);
  const others = live.get(chat.id).filter(l => l !== going);
  if (others.length) live.set(chat.id, others);
  else live.delete(chat.id);
  chat.updated = Date.now();
  saveChat(chat);
  if (current === chat) showChat(chat);
  else showList();
}

function requestFor(chat, index, onward) {
  const messages = [], path = pathTo(chat, index), read = path.slice(droppedOf(chat, path), onward ? undefined : -1);
  if (settings.system.trim()) messages.push({role: 'system', content: settings.system});
  messages.push(...read.map(i => ({role: chat.nodes[i].role, content: contentOf(chat.nodes[i])})));
  const body = {messages, stream: true, stream_options: {include_usage: true}, chat_template_kwargs: {enable_thinking: settings.think && !onward}};
  const {name} = modelOf(chat.nodes[index]);
  if (name) body.model = name;
  const long = longFiles(chat, path);
  if (long.length) body.documents = long.map(({name, text}) => ({title: name, text}));
  else if (HAS_DOCS) body.use_documents = settings.docs;
  const stops = settings.stops.split('\n').filter(line => line);
  if (stops.length) body.stop = stops;
  if (onward && chat.nodes[index].thought) messages.at(-1).reasoning_content = chat.nodes[index].thought;
  if (onward) body.continue_final_message = true, body.add_generation_prompt = false;
  for (const name in SAMPLING) if (Number.isFinite(settings.sampling[name])) body[name] = settings.sampling[name];
  return body;
}

// If the messages leave the answer less than a quarter of the context (or less than its longest), the oldest questions and
// answers are dropped until half of the context is free, as in the terminal (Chat::fit). `full`: the server has refused them.
async function makeRoom(chat, index, request, limit, full, signal) {
  const {messages} = request, system = messages[0].role === 'system' ? 1 : 0;
  const most = limit - Math.min(request.max_tokens || limit, limit / 4) - (request.use_documents || request.documents ? limit / 4 : 0);
  const bytes = messages.reduce((sum, m) => sum + bytesOf(m.content) + 16, 0); // no fewer than their tokens
  if (!limit || (bytes <= most && !full)) return;
  const without = turns => [...messages.slice(0, system), ...messages.slice(system + 2 * turns)];
  const used = async turns => (await idsOf({...request, messages: without(turns)}, signal)).length;
  const all = Math.floor((messages.length - system - 1) / 2);
  if (!all || await used(0) <= most) return;
  let least = 1; // the fewest turns that do, or all
  for (let enough = all; least < enough;) {
    const turns = Math.floor((least + enough) / 2);
    if (await used(turns) <= limit / 2) enough = turns;
    else least = turns + 1;
  }
  request.messages = without(least);
  chat.nodes[index].dropped = droppedOf(chat, pathTo(chat, index)) + 2 * least;
}
async function idsOf({model, messages, chat_template_kwargs, continue_final_message, add_generation_prompt}, signal) {
  const response = await call('tokenize', {method: 'POST', signal, body: JSON.stringify({model, messages, chat_template_kwargs, continue_final_message, add_generation_prompt})});
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()).tokens;
}

async function refusalOf(response) {
  const said = parse(await response.text()), message = said && said.error && string(said.error.message, 1000);
  if (response.status === 401) return {told: 'key'};
  if (response.status === 429) return {told: 'busy'};
  if (response.status === 503) return checkServer(), {told: /load/.test(message) ? 'loading' : 'busy'};
  if (said && said.error && said.error.code === 'context_length_exceeded') return {told: 'tooLong'};
  return {told: message || `HTTP ${response.status}`};
}

async function* eventsOf(stream) { // the text after `data:`
  const reader = stream.getReader(), decoder = new TextDecoder();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, {stream: true})).split('\n');
    rest = lines.pop();
    for (const line of lines) if (line.startsWith('data:')) yield line.slice(5).trim();
  }
}

// At most once a frame, and for at most a quarter of the time.
function redraw(chat, going) {
  if (going.dirty) return;
  going.dirty = true;
  const draw = () => requestAnimationFrame(() => {
    going.dirty = false;
    const view = current === chat && views.get(going.index);
    if (!view || !live.has(chat.id)) return;
    const began = performance.now();
    view.update();
    toEnd();
    going.rest = began + 4 * (performance.now() - began);
  });
  const left = (going.rest || 0) - performance.now();
  if (left > 16) setTimeout(draw, left);
  else draw();
}
function stopAnswer() {
  for (const going of current && live.get(current.id) || []) going.stopped = true, going.stop.abort();
}

let checking, serverState = 'away';
async function checkServer() {
  clearTimeout(checking);
  let state = 'away', again = 3000;
  try {
    const health = await call('health');
    if (health.ok) {
      const list = await call('v1/models');
      models = list.ok ? (await list.json()).data.map(m => ({name: string(m.id), limit: number(m.max_model_len), parent: string(m.parent)})) : [];
      state = 'ready', again = 30000;
    } else if (/loading/.test(await health.text())) {
      state = 'loading', again = 500;
    }
  } catch { /* it is away */ }
  serverState = state;
  showModel();
  checking = setTimeout(checkServer, again);
  showComposer();
}

// ---- The pill at the top, and the list that it opens.
function showModel() {
  model = modelCalled(settings.model) || models[0] || NO_MODEL;
  const other = besideModel();
  $('model').className = serverState;
  $('model').lastChild.classList.toggle('hidden', !models.length);
  $('model').firstChild.textContent = serverState === 'ready' ? model.name + (other ? ` | ${other.name}` : '') || t('keyNeeded') : t(serverState);
  $('model').title = t('modelHelp');
  const focused = [...$('models').querySelectorAll('button')].indexOf(document.activeElement);
  $('models').replaceChildren(...models.map(m => h('div', {},
    h('button', {class: 'one', type: 'button', role: 'radio', 'aria-checked': String(m === model), onclick: () => chooseModel('model', m.name)}, m.name,
      h('small', {}, m.parent ? t('adapterOf', m.parent) : t('context', m.limit.toLocaleString()))),
    m === model ? '' : h('button', {class: 'icon worded', type: 'button', 'aria-pressed': String(m === other), title: t('besideHelp'), 'aria-label': `${t('besideHelp')}: ${m.name}`,
      onclick: () => chooseModel('beside', m === other ? '' : m.name)}, icon('beside', 16), t('beside')))),
    models.length === 1 ? h('p', {}, t('moreModels')) : '');
  if (focused >= 0) $('models').querySelectorAll('button')[focused]?.focus();
}
function chooseModel(which, name) {
  settings[which] = name;
  saveSettings();
  showModel();
  showComposer();
  if (which === 'model') openModels(false);
}
function openModels(open) {
  $('models').classList.toggle('hidden', !open || !models.length);
  $('model').setAttribute('aria-expanded', String(open));
}
$('model').onclick = () => openModels($('models').classList.contains('hidden'));
document.addEventListener('pointerdown', e => { if (!$('pill').contains(e.target)) openModels(false); });
