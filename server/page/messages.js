// messages.js: the questions and answers of the conversation shown.
let current = null;        // the conversation shown; null: one not begun yet
let views = new Map();     // by index of its nodes
let stick = true;          // keep the end of the conversation in view
const live = new Map();    // lists of answers in progress, by conversation

const round = x => x >= 100 ? String(Math.round(x)) : x.toFixed(x >= 10 ? 1 : 2);

class MessageView {
  constructor(chat, index) {
    this.chat = chat;
    this.index = index;
    this.row = h('div', {class: 'row'});
    this.notes = h('div');
    const node = chat.nodes[index];
    this.node = h('article', {class: 'said ' + node.role});
    if (node.role === 'user') {
      if (node.files) this.node.append(filesNode(node.files));
      this.node.append(h('div', {class: 'text', dir: 'auto'}, node.text), this.row);
    } else {
      this.thought = null;
      this.body = new MarkdownView();
      this.body.node.classList.add('text');
      this.holder = h('div', {}, this.body.node);
      this.sources = h('div');
      this.node.append(this.holder, this.sources, this.notes, this.row);
    }
    this.update();
  }
  get said() { return this.chat.nodes[this.index]; }
  get live() {
    return (live.get(this.chat.id) || []).find(l => l.index === this.index) || null;
  }
  update() {
    const node = this.said;
    if (node.role === 'assistant') this.updateAnswer(node, this.live);
    this.updateRow(node, this.live);
  }
  updateAnswer(node, going) {
    if (node.thought && !this.thought) {
      this.thought = new MarkdownView();
      this.summary = h('span');
      this.details = h('details', {class: 'thought', ontoggle: () => this.updateThought(this.said, this.live)},
                       h('summary', {}, icon('right', 14), this.summary), h('div', {}, this.thought.node));
      this.holder.prepend(this.details);
    }
    if (this.thought) this.updateThought(node, going);
    if (this.odds && (going || this.odds.of !== node.text)) this.showOdds(null);
    this.body.set(node.text, !going);
    this.holder.classList.toggle('writing', !!going && !!node.text);
    if (node.sources !== this.shown) this.sources.replaceChildren(...(this.shown = node.sources) ? [sourcesNode(node.sources)] : []);
    const notes = [];
    if (going && !node.text && !node.thought) notes.push(h('div', {class: 'note'}, bars()));
    if (!going) {
      const button = (name, act) => h('button', {class: 'plain', type: 'button', onclick: act}, t(name));
      const onward = node.text && pathOf(this.chat).at(-1) === this.index ? [button('more', () => proceed(this.chat, this.index))] : [];
      if (node.error) notes.push(h('div', {class: 'note bad', role: 'alert'}, h('span', {}, messageOf(node.error)),
        node.error === 'key' ? button('enterKey', () => openSettings('key')) : '', button('retry', () => answerAgain(this.chat, this.index))));
      else if (node.finish === 'length' || node.finish === 'stopped' || node.finish === 'broken') notes.push(h('div', {class: 'note'}, h('span', {}, t(node.finish)), ...onward));
      else if (!node.text) notes.push(h('div', {class: 'note'}, t('empty')));
    }
    if (!(going && this.notes.firstChild && notes.length)) this.notes.replaceChildren(...notes);
  }
  updateThought(node, going) {
    const busy = going && !node.text;
    if (busy && !this.summary.querySelector('.bars')) this.summary.replaceChildren(bars(), ' ', h('span'));
    if (busy) this.summary.lastChild.textContent = `${t('thinking')} … ${Math.round((performance.now() - going.start) / 1000)} s`;
    else this.summary.replaceChildren(node.mused ? t('thought', round(node.mused)) : t('thoughtPlain'));
    if (this.details.open) this.thought.set(node.thought, !busy);
  }
  updateRow(node, going) {
    const act = (name, picture, run) => h('button', {class: 'icon', type: 'button', title: t(name), 'aria-label': t(name), onclick: run}, icon(picture, 16));
    const parts = [], all = siblings(this.chat, this.index), busy = live.has(this.chat.id);
    if (all.length > 1 && !busy) {
      const k = all.indexOf(this.index), to = step => () => { this.chat.at = lastLeaf(this.chat, all[k + step]); saveChat(this.chat); showChat(this.chat); };
      const back = act('previous', 'left', to(-1)), on = act('next', 'right', to(1));
      back.disabled = k === 0, on.disabled = k === all.length - 1;
      parts.push(h('span', {class: 'turns'}, back, `${k + 1} / ${all.length}`, on));
    }
    if (!going && node.text) {
      const button = act('copy', 'copy', () => copy(this.said.text, button));
      parts.push(button);
    }
    if (node.beside !== undefined && !busy && !pathOf(this.chat).includes(this.index))
      parts.push(act('useThis', 'done', () => { this.chat.at = lastLeaf(this.chat, this.index); saveChat(this.chat); showChat(this.chat); }));
    if (node.role === 'assistant' && !busy && node.text) {
      const button = act('odds', 'chart', () => this.toggleOdds(button));
      button.classList.add('worded'), button.append(t('oddsShort'));
      button.setAttribute('aria-pressed', String(!!this.odds));
      parts.push(button);
    }
    if (node.role === 'user' && !busy) parts.push(act('edit', 'edit', () => this.edit()));
    if (node.role === 'assistant' && !busy) parts.push(act('again', 'again', () => answerAgain(this.chat, this.index)));
    const spent = node.seconds - node.first, stats = node.model ? [node.model] : [];
    if (node.tokens) stats.push(t('tokens', node.tokens));
    if (node.tokens > 1 && spent > .01) stats.push(t('rate', round((node.tokens - 1) / spent)));
    if (stats.length) parts.push(h('span', {class: 'stats', title: node.tokens && t('first', round(node.first || 0))}, stats.join(' · ')));
    this.row.replaceChildren(...parts);
  }
  // The answer with its tokens coloured by their probability, instead of its Markdown; null: the Markdown.
  showOdds(odds) {
    if (this.odds) this.odds.node.remove();
    this.odds = odds;
    if (odds) this.holder.append(odds.node);
    this.body.node.classList.toggle('hidden', !!odds);
  }
  async toggleOdds(button) {
    if (this.odds) {
      this.showOdds(null);
    } else {
      const text = this.said.text;
      button.disabled = true;
      try {
        const odds = new OddsView(await oddsOf(this.chat, this.index));
        odds.of = text;
        this.showOdds(odds);
      } catch (fault) {
        toast(messageOf(fault.told || fault.message));
      }
    }
    this.update();
  }
  edit() {
    const area = h('textarea', {dir: 'auto', 'aria-label': t('edit')}), before = [...this.node.childNodes];
    area.value = this.said.text;
    const back = () => this.node.replaceChildren(...before);
    const send = () => {
      const text = area.value.trim();
      if (!text || live.has(this.chat.id)) return;
      back();
      if (text === this.said.text) return;
      ask(this.chat, this.said.parent, text, this.said.files);
    };
    area.addEventListener('keydown', e => {
      if (e.isComposing) return;
      if (e.key === 'Escape') e.stopPropagation(), back();
      if (e.key === 'Enter' && !e.shiftKey) e.preventDefault(), send();
    });
    this.node.replaceChildren(area, h('div', {class: 'choose'}, h('button', {class: 'plain', type: 'button', onclick: back}, t('cancel')),
                                      h('button', {class: 'main', type: 'button', onclick: send}, t('save'))));
    area.style.height = Math.min(area.scrollHeight + 4, innerHeight / 2) + 'px';
    area.focus();
  }
}
function sourcesNode(sources) {
  if (!sources.length) return h('div', {class: 'note'}, t('noSource'));
  return h('details', {class: 'sources'}, h('summary', {}, t('sources', sources.length)), sources.map((s, i) =>
    h('details', {}, h('summary', {dir: 'auto'}, `[${i + 1}] ${s.file}:${s.line}${s.heading && ' · ' + s.heading}`), h('pre', {dir: 'auto', tabindex: 0}, s.text))));
}
const messageOf = error => ['key', 'busy', 'offline', 'loading', 'tooLong'].includes(error) ? t({key: 'keyNeeded'}[error] || error) : error;

function showChat(chat) {
  const same = chat === current;
  current = chat;
  const path = chat ? pathOf(chat) : [], dropped = chat ? droppedOf(chat, path) : 0, old = views;
  views = new Map();
  const show = i => {
    const view = same && old.get(i) || new MessageView(chat, i);
    if (same && old.has(i)) view.update();
    view.node.classList.toggle('on', path.includes(i));
    view.node.classList.toggle('gone', path.indexOf(i) >= 0 && path.indexOf(i) < dropped);
    views.set(i, view);
    return view.node;
  };
  const both = i => [i, chat.nodes[i].beside].sort((a, b) => a - b);
  const rows = path.map(i => chat.nodes[i].beside === undefined ? show(i) : h('div', {class: 'beside'}, both(i).map(show)));
  if (dropped) rows.splice(dropped, 0, h('div', {class: 'note line', role: 'status'}, t('dropped', dropped)));
  $('log').replaceChildren(...rows);
  $('hello').classList.toggle('hidden', path.length > 0);
  $('log').classList.toggle('hidden', path.length === 0);
  $('name').textContent = chat ? chat.title : '';
  document.title = chat && chat.title ? `${chat.title} · ${TITLE}` : TITLE;
  const url = chat ? '#' + chat.id : location.pathname;
  if (!same) history.replaceState(null, '', url), stick = true;
  showList();
  showComposer();
  showUnkept();
  toEnd();
}
function toEnd() {
  if (stick) $('scroll').scrollTop = $('scroll').scrollHeight;
  $('down').classList.toggle('hidden', stick || !current);
}
$('scroll').addEventListener('scroll', () => {
  const s = $('scroll');
  stick = s.scrollHeight - s.scrollTop - s.clientHeight < 48;
  $('down').classList.toggle('hidden', stick || !current);
}, {passive: true});
