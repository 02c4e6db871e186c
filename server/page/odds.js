// odds.js: how likely the model finds each token of an answer. The server computes it afterwards, for the text as it
// stands (prompt_logprobs): so any answer can be shown, and answering is not slowed down.
const ALTERNATIVES = 5;

// [{text, p, others: [[text, p], ...]}]
async function oddsOf(chat, index) {
  const node = chat.nodes[index], request = requestFor(chat, index, true), own = !!request.documents;
  const {messages} = request, whole = await idsOf(request);
  const start = (await idsOf({...request, messages: [...messages.slice(0, -1), {...messages.at(-1), content: ''}]})).length;
  const ids = whole.slice(start), asked = {max_tokens: 1, prompt_logprobs: ALTERNATIVES};
  for (const name of ['model', 'messages', 'chat_template_kwargs', 'continue_final_message', 'add_generation_prompt']) asked[name] = request[name];
  if (own && node.sources) asked.documents = request.documents;
  else if (HAS_DOCS) asked.use_documents = !own && !!node.sources;
  const response = await call('v1/chat/completions', {method: 'POST', body: JSON.stringify(asked)});
  if (!response.ok) throw await refusalOf(response);
  const told = ids.length ? (await response.json()).prompt_logprobs.slice(-ids.length) : [];
  return joinBytes(node.text, ids.map((id, k) => ({
    text: told[k][id].decoded_token, p: Math.exp(told[k][id].logprob),
    others: Object.entries(told[k]).filter(([other]) => other !== String(id)).map(([, o]) => [o.decoded_token, Math.exp(o.logprob)]).sort((a, b) => b[1] - a[1]),
  })));
}
// Tokens that are parts of a character become one, with the text between their neighbours, and the product of the odds.
function joinBytes(text, tokens) {
  const out = [];
  for (let i = 0, at = 0; i < tokens.length;) {
    const first = i, broken = k => k < tokens.length && tokens[k].text.includes('\ufffd');
    while (broken(i)) i++;
    if (i === first) {
      at += tokens[i].text.length;
      out.push(tokens[i++]);
      continue;
    }
    const end = i < tokens.length ? text.indexOf(tokens[i].text, at + 1) : text.length, some = tokens.slice(first, i);
    const joined = end > at ? text.slice(at, end) : some.map(s => s.text).join('');
    out.push({text: joined, p: some.reduce((p, s) => p * s.p, 1), others: some[0].others});
    at += joined.length;
  }
  return out;
}

class OddsView {
  constructor(tokens) {
    this.tokens = tokens;
    this.panel = h('div', {class: 'panel', role: 'status'}, t('oddsHelp'));
    this.text = h('div', {class: 'text odds', tabindex: 0, dir: 'auto', 'aria-label': t('odds'), onclick: e => {
      const k = [...this.text.children].indexOf(e.target);
      if (k >= 0) this.choose(k);
    }, onkeydown: e => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[e.key];
      if (step) e.preventDefault(), this.choose(Math.min(Math.max((this.at ?? -1) + step, 0), tokens.length - 1));
    }}, tokens.map(({text, p}) => h('span', {class: 'p' + [.05, .2, .5, .9].filter(limit => p >= limit).length, title: percent(p)}, text)));
    this.node = h('div', {}, this.text, this.panel);
  }
  choose(k) {
    const chosen = this.text.children[this.at];
    if (chosen) chosen.classList.remove('chosen');
    this.text.children[this.at = k].classList.add('chosen');
    const {text, p, others} = this.tokens[k];
    const row = (word, odds, own) => [h('dt', {class: own && 'own'}, h('code', {}, visible(word))), h('dd', {}, h('meter', {max: 1, value: odds}), percent(odds))];
    this.panel.replaceChildren(h('dl', {}, [[text, p, true], ...others].sort((a, b) => b[1] - a[1]).flatMap(o => row(...o))));
  }
}
const percent = p => p >= .0005 ? (100 * p).toFixed(1) + ' %' : '< 0.1 %';
const visible = text => text.replace(/ /g, '␣').replace(/\n/g, '↵').replace(/\t/g, '⇥') || '∅';
