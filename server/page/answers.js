// answers.js: requests to the server, and their answers.
let model = {name: '', limit: 0};

async function call(path, options = {}) {
  const headers = {};
  if (settings.key) headers.Authorization = 'Bearer ' + settings.key;
  if (options.body) headers['Content-Type'] = 'application/json';
  return fetch(path, {...options, headers, cache: 'no-store', credentials: 'same-origin'});
}

// A question, as a new branch behind `parent`, and its answer.
function ask(chat, parent, text) {
  addNode(chat, parent, 'user', text);
  if (!chat.title) chat.title = titleOf(text);
  chats.set(chat.id, chat);
  stick = true;
  answer(chat, addNode(chat, chat.at, 'assistant', ''));
}
function answerAgain(chat, index) { // an error leaves no branch
  if (live.has(chat.id)) return;
  const node = chat.nodes[index];
  if (node.error && !node.text && index === chat.nodes.length - 1) chat.nodes.pop(), views.delete(index);
  stick = true;
  answer(chat, addNode(chat, node.parent, 'assistant', ''));
}
function proceed(chat, index) {
  if (!live.has(chat.id)) answer(chat, index);
}

// If the node has a text already, the model continues it.
async function answer(chat, index) {
  const node = chat.nodes[index], onward = !!node.text, before = {tokens: node.tokens || 0, seconds: onward ? node.seconds - node.first || 0 : 0};
  delete node.error, delete node.finish;
  const going = {index, stop: new AbortController(), start: performance.now(), dirty: false, tokens: 0, first: 0, stopped: false};
  live.set(chat.id, going);
  showChat(chat);
  const saving = setInterval(() => saveChat(chat), 1000);
  const count = tokens => {
    const now = performance.now();
    node.tokens = before.tokens + tokens;
    node.first = going.first ? (going.first - going.start) / 1000 : 0;
    node.seconds = before.seconds + (now - going.start) / 1000;
  };
  try {
    const request = requestFor(chat, index, onward);
    let response;
    for (;;) {
      response = await call('v1/chat/completions', {method: 'POST', body: JSON.stringify(request), signal: going.stop.signal});
      if (response.ok) break;
      const refusal = await refusalOf(response);
      if (refusal.told !== 'tooLong' || !request.max_tokens) throw refusal;
      delete request.max_tokens; // the limit exceeds the remaining room, which then is the limit
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
  live.delete(chat.id);
  chat.updated = Date.now();
  saveChat(chat);
  if (current === chat) showChat(chat);
  else showList();
}

function requestFor(chat, index, onward) {
  const messages = [];
  if (settings.system.trim()) messages.push({role: 'system', content: settings.system});
  for (let i = onward ? index : chat.nodes[index].parent, path = []; i >= 0 || (messages.push(...path.reverse()), false); i = chat.nodes[i].parent)
    path.push({role: chat.nodes[i].role, content: chat.nodes[i].text});
  const body = {messages, stream: true, stream_options: {include_usage: true}, chat_template_kwargs: {enable_thinking: settings.think && !onward}};
  if (model.name) body.model = model.name;
  if (HAS_DOCS) body.use_documents = settings.docs;
  if (onward) body.continue_final_message = true, body.add_generation_prompt = false;
  for (const name in SAMPLING) if (Number.isFinite(settings.sampling[name])) body[name] = settings.sampling[name];
  return body;
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
  const going = current && live.get(current.id);
  if (going) going.stopped = true, going.stop.abort();
}

let checking;
async function checkServer() {
  clearTimeout(checking);
  let state = 'away', again = 3000;
  try {
    const health = await call('health');
    if (health.ok) {
      const list = await call('v1/models');
      const first = list.ok && (await list.json()).data[0];
      if (first) model = {name: string(first.id), limit: number(first.max_model_len)};
      state = 'ready', again = 30000;
    } else if (/loading/.test(await health.text())) {
      state = 'loading', again = 500;
    }
  } catch { /* it is away */ }
  $('model').className = state;
  $('model').firstChild.textContent = state === 'ready' ? model.name || t('keyNeeded') : t(state);
  $('model').title = state === 'ready' && model.limit ? `${model.name} · ${model.limit.toLocaleString()} token` : '';
  checking = setTimeout(checkServer, again);
  showComposer();
}
