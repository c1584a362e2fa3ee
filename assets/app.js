/*
 * The page: which scenario, which step, which policy in the player, and the controls for all of it.
 * The server is asked for everything about a scenario at once (`look`) and answers with JSON text;
 * runs arrive as a stream through Gradio's queue. Whatever comes from a scenario, an address or an
 * error is set as text, never as markup.
 */
(function (global) {
  'use strict';

  const POLICIES = ['sglang', 'unguarded', 'extended'];
  const MARKS = { verified: '✓', wrong: '✗', refused: '⊘', crashed: '!', timeout: '!', failed: '!' };
  const LONGEST_QUERY = 6000; // beyond this, state goes behind the # and never to a server

  const WORDS = {
    'rank': 'One process with its own device. P = U · R ranks work on one attention together.',
    'Ulysses U': 'Ulysses degree: U neighbouring ranks swap sequence shards for head shards in an all-to-all, attend, and swap back.',
    'ring R': 'Ring degree: R ranks keep their queries and pass keys and values round, hop by hop, merging partial softmaxes.',
    'rank order': 'Which axis neighbouring ranks lie on. sglang is always ulysses-inner.',
    'S': 'Tokens of one sequence (rows), per batch row, before they are sharded over the ranks.',
    'shards': 'The rows that each rank holds, by sequence position. Uneven ones are what sglang calls seq_lens.',
    'varlen': 'Two different things, which this page keeps apart: uneven shards (seq_lens in sglang) and packed documents (cu_seqlens elsewhere).',
    'documents': 'Packed documents: several sequences laid end to end; attention stays inside each.',
    'layout': 'Which rows a position holds: one run (contiguous), an early and a late chunk (zigzag), or every R-th row (striped).',
    'replicated': 'Rows that every rank holds besides its shard: text tokens beside image tokens, for example.',
    'layer': "sglang's attention layer: USPAttention knows rings, the older UlyssesAttention does not.",
    'causal': 'Each query sees only keys at or before its own position.',
    'mask': 'Which (query, key) pairs are allowed. Masks, documents and causal are all applied together.',
    'seq_lens': 'Whether the layer is told the shard lengths. auto: when shards are uneven.',
    'skip': 'skip_sequence_parallel: no communication; each rank attends to what it holds.',
    'heads H': 'Query heads. Under Ulysses each rank attends with about H / U of them.',
    'KV heads G': 'Key/value heads; G divides H. Fewer than H is grouped-query attention.',
    'head dim D': 'Numbers per head and row.',
    'batch B': 'Batch rows, each with S tokens.',
    'dtype': 'Precision of Q, K, V. The reference is always computed in float64.',
    'release': 'Whose refusals the sglang policy follows. Rules move between releases.',
    'sglang backend': 'What the sglang deployment uses; only its rules read it.',
    'backend': 'The attention kernel that we run.',
    'engine': 'Who computes: this program, or another library.',
    'hop': 'One turn of the ring: every rank hands its K/V block to the next and attends to the one it received.',
    'LSE': 'Log-sum-exp of the scores: the weight with which partial outputs are merged. A block that a row may not see weighs nothing, minus infinity.',
    'all-to-all': 'Every rank of a Ulysses group sends every other a part: rows for heads before attention, heads for rows after it.',
    'behind the guard': "The same release with the ring-size block of the three refusals skipped: what the refusal saves you from.",
    'ring-aware': 'Our path that runs all of it: uneven shards, any mask, any batch, on a ring.',
    'verified': 'Every scored row is within tolerance of a float64 reference of the whole attention.',
  };

  const FORM = [
    ['Mesh', true, [
      ['mesh.ulysses', 'Ulysses U', 'pills'], ['mesh.ring', 'ring R', 'pills'], ['mesh.order', 'rank order', 'select'],
    ]],
    ['Tokens', true, [
      ['tokens.total', 'S', 'number', 1], ['tokens.shards', 'shards', 'shards'], ['tokens.documents', 'documents', 'list'],
      ['tokens.layout', 'layout', 'select'],
      ['tokens.replicated', 'replicated', 'triple'],
    ]],
    ['Attention', true, [
      ['attention.layer', 'layer', 'select'], ['attention.causal', 'causal', 'check'], ['attention.mask', 'mask', 'mask'],
      ['attention.seq_lens', 'seq_lens', 'select'], ['attention.skip_sequence_parallel', 'skip', 'check', 0, 'skip SP'], ['attention.skip_kv', 'skip', 'select', 0, 'KV under skip'],
    ]],
    ['Tensors', false, [
      ['tensors.heads', 'heads H', 'number', 1], ['tensors.kv_heads', 'KV heads G', 'pills'], ['tensors.head_dim', 'head dim D', 'number', 1],
      ['tensors.batch', 'batch B', 'number', 1], ['tensors.dtype', 'dtype', 'select'], ['tensors.values', null, 'select', 0, 'values of V'],
    ]],
    ['Who runs it', false, [
      ['release', 'release', 'select'], ['attention.sglang_backend', 'sglang backend', 'select'], ['attention.backend', 'backend', 'select'],
      ['engine', 'engine', 'select'], ['run.device', null, 'select', 0, 'device'], ['run.seed', null, 'number', 0, 'seed'], ['run.timeout_s', null, 'number', 0, 'timeout, s'],
    ]],
  ];

  const MASKS = {
    key: { valid: 'list', holes: 'pairs' }, tail_pad: { start: 'int' }, gap_pad: { start: 'int', end: 'int' },
    window: { left: 'maybe', right: 'maybe' }, prefix_lm: { prefix: 'int' }, dense: { density: 'float', seed: 'int' },
  };
  const MASK_NAMES = { key: 'key mask', tail_pad: 'tail pad, metadata', gap_pad: 'gap pad, metadata', window: 'sliding window', prefix_lm: 'prefix LM', dense: 'dense, random' };

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const name in attributes || {}) {
      const v = attributes[name];
      if (name.startsWith('on')) node.addEventListener(name.slice(2), v);
      else if (v === true) node.setAttribute(name, '');
      else if (v !== false && v !== null && v !== undefined) node.setAttribute(name, v);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const button = (text, onclick, more) => el('button', { type: 'button', onclick, ...more }, text);
  const at = (data, dotted) => dotted.split('.').reduce((node, key) => (node === null || node === undefined ? undefined : node[key]), data);
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const show = (v) => (typeof v === 'string' ? v : JSON.stringify(v));

  /** Until there are cards: how each policy ended, in a line. */
  function PlainVerdicts(root) {
    const lines = new Map();
    return {
      begin() { lines.clear(); root.replaceChildren(...POLICIES.map((p) => { const line = el('p', null, `${p}: waiting`); lines.set(p, line); return line; })); },
      result(policy, details) { const r = details.result || details, e = r.error; lines.get(policy).textContent = `${policy}: ${r.outcome}${e ? ` — ${e.class}: ${e.message}` : ''}`; },
      failed(policy, text) { lines.get(policy).textContent = `${policy}: ${text}`; },
      clear() { root.replaceChildren(); },
    };
  }

  global.USPApp = function (host, server, data) {
    if (host.uspApp) host.uspApp.destroy();
    const stop = new AbortController();
    const on = (target, event, handler) => target.addEventListener(event, handler, { signal: stop.signal });
    const config = global.gradio_config || {};
    const api = `${config.root || ''}${config.api_prefix || '/gradio_api'}`;

    /** What is shown. `seen` is the answer about the last valid scenario, `text` what stands in the editor. */
    const state = { text: '', seen: null, error: null, show: 'sglang', step: 0, tab: 'controls', present: false, scenes: {}, outcomes: {}, before: null, stale: true, running: null };
    let asked = 0, urlTimer = 0, typing = 0, pending = null, hash = null, unanswered = {};

    // -- Elements --------------------------------------------------------------------------------
    const ui = {};
    ui.theme = button('', flipTheme, { class: 'uspage-quiet' });
    ui.presentButton = button('Present', () => present(!state.present), { class: 'uspage-quiet', title: 'Large type, controls folded, clicker keys' });
    ui.title = el('span', { class: 'uspage-title' });
    ui.pick = el('button', { type: 'button', class: 'uspage-pick', 'aria-haspopup': 'dialog', onclick: () => ui.menu.showModal() },
      el('span', { class: 'uspage-eyebrow' }, 'Scenario'), ui.title, el('span', { class: 'uspage-caret', 'aria-hidden': 'true' }, '▾'));
    ui.top = el('header', { class: 'uspage-top' },
      el('h1', null, 'USP Viz'), el('p', null, 'Sequence parallelism, Ulysses × ring: see every token move, and check it on real ranks'), el('h2', { class: 'uspage-h2' }, ui.pick),
      el('nav', { 'aria-label': 'Page' },
        button('Copy link', share, { class: 'uspage-quiet' }), button('Save replay', save, { class: 'uspage-quiet', title: 'The replay as one HTML file that needs no network' }),
        button('Words', () => ui.words.showModal(), { class: 'uspage-quiet' }), ui.theme, ui.presentButton));

    ui.description = el('p', { class: 'uspage-description' });
    ui.facts = el('p', { class: 'uspage-facts' });
    ui.notice = el('div', { class: 'uspage-notice', role: 'alert', hidden: true });
    ui.paste = el('textarea', { rows: '1', 'aria-label': 'Paste an error text or a launch command', placeholder: 'Paste an error or a launch command', spellcheck: 'false', autocapitalize: 'off' });
    ui.pasted = el('div', { class: 'uspage-pasted', 'aria-live': 'polite', hidden: true });
    ui.find = el('form', { class: 'uspage-find', onsubmit: (e) => { e.preventDefault(); find(); } }, ui.paste, el('button', { type: 'submit' }, 'Find'));
    ui.head = el('div', { class: 'uspage-head' }, el('div', { class: 'uspage-headline' }, ui.description, ui.facts), ui.find);

    ui.tabs = el('div', { class: 'uspage-tabs', role: 'tablist', 'aria-label': 'How to change the scenario' });
    ui.controls = el('div', { class: 'uspage-controls', role: 'tabpanel', 'aria-label': 'Controls' });
    ui.editor = el('textarea', { class: 'uspage-editor', 'aria-label': 'The scenario as YAML', spellcheck: 'false', autocapitalize: 'off', wrap: 'off' });
    ui.gutter = el('pre', { class: 'uspage-gutter', 'aria-hidden': 'true' });
    ui.editorNote = el('p', { class: 'uspage-note' }, 'The scenario file, as the command line reads it.');
    ui.yaml = el('div', { class: 'uspage-yaml', role: 'tabpanel', 'aria-label': 'YAML' }, el('div', { class: 'uspage-code' }, ui.gutter, ui.editor), ui.editorNote);
    ui.side = el('details', { class: 'uspage-side uspage-panel', open: innerWidth > 900 }, el('summary', null, 'Change the scenario'), ui.tabs, ui.controls, ui.yaml);

    ui.policies = el('div', { class: 'uspage-policies', role: 'group', 'aria-label': 'Whose replay' });
    ui.mount = el('div', { class: 'uspage-player' });
    ui.playerPanel = el('section', { class: 'uspage-panel uspage-stagebox', 'aria-label': 'Replay' }, ui.policies, ui.mount);

    ui.run = button('Run on ranks', () => run(), { class: 'uspage-run', title: 'Ctrl+Enter' });
    ui.cancel = button('Cancel', cancel, { class: 'uspage-quiet', hidden: true });
    ui.status = el('p', { class: 'uspage-status', role: 'status' });
    ui.before = el('div', { class: 'uspage-before', hidden: true });
    ui.cards = el('div', { class: 'uspage-cards' });
    ui.verdicts = el('section', { class: 'uspage-verdicts', 'aria-label': 'Verdicts' }, el('div', { class: 'uspage-runbar' }, el('h2', { class: 'uspage-section' }, 'Three answers to the same scenario'), ui.status, ui.cancel, ui.run), ui.before, ui.cards);

    ui.menu = el('dialog', { class: 'uspage-dialog uspage-menu', 'aria-label': 'Scenarios' }); closing(ui.menu);
    ui.words = el('dialog', { class: 'uspage-dialog', 'aria-label': 'Words' }, el('div', { class: 'uspage-menuhead' }, el('h2', null, 'Words'), button('Close', () => ui.words.close(), { class: 'uspage-quiet' })), el('dl', null, Object.entries(WORDS).flatMap(([term, text]) => [el('dt', null, term), el('dd', null, text)]))); closing(ui.words);
    ui.word = el('div', { class: 'uspage-word', popover: 'auto' });
    ui.leave = button('Leave presenter mode', () => present(false), { class: 'uspage-leave uspage-quiet' });

    const root = el('div', { class: 'uspage' }, ui.top, el('div', { class: 'uspage-body' }, ui.head, ui.pasted, ui.notice, ui.side, el('div', { class: 'uspage-main' }, ui.playerPanel, ui.verdicts)), ui.menu, ui.words, ui.word, ui.leave);
    const mount = host.querySelector('.uspage-mount') || host;
    mount.replaceChildren(root);

    const player = global.USPPlayer(ui.mount, { theme: 'auto', globalKeys: true, onFork: fork });
    const points = { onApplyFix, onPoint, onRunAgain: () => run() };
    const cards = typeof global.USPVerdicts === 'function' ? global.USPVerdicts(ui.cards, points) : PlainVerdicts(ui.cards);
    player.on('step', (n) => { state.step = n; later(); });
    player.on('pause', () => { if (pending) { const scene = pending; pending = null; load(scene, state.step); } });

    function closing(dialog) { dialog.addEventListener('click', (e) => { if (e.target === dialog) dialog.close(); }); }

    // -- Asking the server -----------------------------------------------------------------------
    async function ask(question, how) {
      const number = ++asked;
      root.dataset.asking = 'yes';
      let found;
      try { found = JSON.parse(await server.look({ show: state.show, ...question })); } catch (error) { found = { text: state.text, error: { message: `The server does not answer: ${error.message || error}`, key: '', nearest: [], line: null } }; }
      if (number !== asked) return null;
      root.dataset.asking = 'no';
      take(found, how || {});
      return found;
    }

    /** Show an answer; `how` may say keep (the editor's text), step, run, replace (no new history entry). */
    function take(found, how) {
      unanswered = {};
      if (!how.keep) { state.text = found.text; ui.editor.value = found.text; }
      state.error = found.error; lines();
      if (found.error) { notice(); root.dataset.state = 'invalid'; ui.run.disabled = true; if (state.seen) controls(); return; }
      const other = found.hash !== hash; hash = found.hash;
      state.seen = found; state.show = found.show; notice();
      if (other) { state.scenes = {}; state.outcomes = {}; state.stale = true; halt(); if (!how.fix) cards.clear(); pending = null; }
      root.dataset.state = 'valid'; ui.run.disabled = Boolean(found.limit);
      headline(); controls(); policies(); status();
      if (found.scene) load(state.scenes[state.show] || found.scene, how.step === undefined ? (other ? 0 : state.step) : how.step);
      else ui.mount.dataset.empty = 'yes';
      address(how.replace ? 'replaceState' : other ? 'pushState' : 'replaceState');
      if (how.run && !found.limit) run();
    }

    function load(scene, step) {
      if (player.state.status === 'playing') { pending = scene; return; }
      player.load(scene, step); state.step = player.state.step; state.scene = scene;
      const box = ui.mount.querySelector('.usp'); if (box) box.toggleAttribute('data-present', state.present);
    }

    /** Changes that no answer has come to yet go along with the next. */
    function change(set, how) { unanswered = { ...unanswered, ...set }; return ask({ text: state.text, set: unanswered }, how); }

    // -- What it is ------------------------------------------------------------------------------
    function headline() {
      const s = state.seen, n = s.normal, m = n.mesh, uneven = new Set(s.shards).size > 1;
      ui.title.textContent = s.title; ui.description.textContent = ui.description.title = s.description;
      document.title = `${s.title.slice(0, 80)} · USP Viz`;
      const parts = [`${m.ulysses * m.ring} rank${m.ulysses * m.ring > 1 ? 's' : ''}: U ${m.ulysses} × R ${m.ring}`,
        `${n.tokens.total} tokens in ${uneven ? `uneven shards ${s.shards.slice(0, 8).join(' · ')}${s.shards.length > 8 ? ' …' : ''}` : `shards of ${s.shards[0]}`}`,
        `${n.tensors.heads} heads${n.tensors.kv_heads !== n.tensors.heads ? `, ${n.tensors.kv_heads} KV` : ''}`, n.attention.layer];
      if (n.attention.causal) parts.push('causal');
      if (n.attention.mask !== 'none') parts.push('masked');
      if (n.tokens.documents && n.tokens.documents.length > 1) parts.push(`${n.tokens.documents.length} documents`);
      ui.facts.textContent = parts.join('  ·  ');
    }

    function notice() {
      const e = state.error, s = state.seen, lines = [];
      if (e) {
        lines.push(el('p', null, e.line ? `Line ${e.line}: ${e.message}` : e.message), el('div', { class: 'uspage-choices' }, suggestions(e)));
        if (s) lines[1].append(button('Undo', () => ask({ address: s.address }, { replace: true }), { class: 'uspage-quiet' }));
      } else if (s && (s.limit || s.unseen)) lines.push(el('p', null, s.limit || s.unseen), el('div', { class: 'uspage-choices' }, button('Shrink it to what meets the same rules', () => find(state.text))));
      ui.notice.dataset.kind = e ? 'error' : 'limit'; ui.notice.replaceChildren(...lines); ui.notice.hidden = !lines.length;
    }

    /** Nearest legal values as buttons; what cannot be set by a dotted key stays in the message. */
    function suggestions(e) {
      if (!/^[a-z_]+(\.[a-z_]+)*$/.test(e.key || '')) return [];
      const made = (e.nearest || []).slice(0, 4).map((value) => button(`${e.key}: ${show(value).slice(0, 60)}`, () => change({ [e.key]: value })));
      if (/use shards: auto/.test(e.limit || '')) made.unshift(button('tokens.shards: auto', () => change({ 'tokens.shards': 'auto' })));
      const list = /adds up to (\d+)$/.exec(e.limit || ''); if (list) made.push(button(`tokens.total: ${list[1]}`, () => change({ 'tokens.total': Number(list[1]) })));
      return made;
    }

    function menu() {
      const groups = data.catalog.map(({ group, scenarios }) => el('section', null, el('h3', null, group), scenarios.map((s) => el('button', { type: 'button', class: 'uspage-scenario', 'data-name': s.name, onclick: () => { ui.menu.close(); choose(s.name); } },
        el('b', null, s.title), el('span', { class: 'uspage-mesh' }, s.mesh), el('span', null, s.promise)))));
      const file = el('input', { type: 'file', accept: '.yaml,.yml,.json,text/*', 'aria-label': 'Open a scenario file', onchange: async () => { if (!file.files[0]) return; const text = await file.files[0].text(); ui.menu.close(); tab('yaml'); ask({ text }, { run: true }); file.value = ''; } });
      groups.push(el('section', null, el('h3', null, 'Your own'),
        el('button', { type: 'button', class: 'uspage-scenario', onclick: () => { ui.menu.close(); tab('yaml'); ui.side.open = true; ask({ text: 'name: mine\ntitle: My own\nmesh: {ulysses: 2, ring: 2}\ntensors: {heads: 8, head_dim: 32}\ntokens: {total: 48}\n' }, {}); ui.editor.focus(); } }, el('b', null, 'Start from a plain one'), el('span', null, 'Four ranks, no mask; change it by controls or as YAML.')),
        el('label', { class: 'uspage-scenario' }, el('b', null, 'Open a file'), el('span', null, 'A scenario in YAML or JSON; it is read here and sent as text.'), file)));
      ui.menu.replaceChildren(el('div', { class: 'uspage-menuhead' }, el('h2', null, 'Choose a scenario'), button('Close', () => ui.menu.close(), { class: 'uspage-quiet' })), el('div', { class: 'uspage-groups' }, groups));
    }

    const choose = (name) => { state.before = null; ui.pasted.hidden = true; return ask({ name, show: null }, { step: 0, run: true }); };

    function fork(step) {
      const name = `${(state.seen && state.seen.name) || 'mine'}`.replace(/(-fork)?$/, '-fork').slice(-80);
      ui.side.open = true; tab('controls');
      change({ name }, { step }).then(() => { address('pushState'); const first = ui.controls.querySelector('button, input, select'); if (first) first.focus(); });
    }

    // -- Find: an error text, a launch command -----------------------------------------------------
    async function find(given) {
      const text = (given || ui.paste.value).trim(); if (!text) return;
      let found;
      try { found = JSON.parse(await server.find(text)); } catch (error) { found = { said: [`The server does not answer: ${error.message || error}`], choices: [] }; }
      tell(found.said, found.choices.map((c) => button(c.title, () => ask({ text: c.text, show: null }, { step: 0, run: true }))));
      if (found.text) { state.before = null; ask({ text: found.text, show: null }, { step: 0, run: true }); }
    }

    function tell(lines, choices) {
      ui.pasted.hidden = false;
      ui.pasted.replaceChildren(el('div', null, lines.map((line) => el('p', null, line))), el('div', { class: 'uspage-choices' }, choices, button('Dismiss', () => { ui.pasted.hidden = true; }, { class: 'uspage-quiet' })));
    }

    // -- Controls ----------------------------------------------------------------------------------
    function tab(name) {
      state.tab = name === 'yaml' ? 'yaml' : 'controls';
      ui.tabs.replaceChildren(...[['controls', 'Controls'], ['yaml', 'YAML']].map(([id, label]) => button(label, () => { tab(id); later(); }, { role: 'tab', 'aria-selected': String(state.tab === id), 'data-tab': id })));
      ui.controls.hidden = state.tab !== 'controls'; ui.yaml.hidden = state.tab !== 'yaml'; lines();
    }

    function term(word, label) {
      if (!word) return el('span', null, label);
      return el('button', { type: 'button', class: 'uspage-term', onclick: (e) => explain(e.currentTarget, word) }, label || word);
    }
    function explain(anchor, word) {
      ui.word.replaceChildren(el('b', null, word), el('p', null, WORDS[word]));
      ui.word.showPopover(); const r = anchor.getBoundingClientRect(), w = ui.word.offsetWidth, h = ui.word.offsetHeight;
      ui.word.style.left = `${Math.max(8, Math.min(innerWidth - w - 8, r.left))}px`; ui.word.style.top = `${r.bottom + h + 8 > innerHeight ? Math.max(8, r.top - h - 6) : r.bottom + 6}px`;
    }

    function controls() {
      const focused = root.contains(document.activeElement) ? document.activeElement.closest('[data-key]') : null, key = focused && focused.dataset.key;
      const open = new Map([...ui.controls.querySelectorAll('details')].map((d) => [d.dataset.group, d.open]));
      ui.controls.replaceChildren(...FORM.map(([group, opened, fields]) => el('details', { class: 'uspage-group', 'data-group': group, open: open.has(group) ? open.get(group) : opened }, el('summary', null, group), fields.filter(([key]) => key !== 'attention.skip_kv' || state.seen.normal.attention.skip_sequence_parallel).map(field))));
      if (key) { const again = ui.controls.querySelector(`[data-key="${CSS.escape(key)}"]`); if (again) again.focus(); }
    }

    function field([key, word, kind, least, label]) {
      const value = at(state.seen.normal, key), body = MAKERS[kind](key, value, least);
      const row = el('div', { class: 'uspage-field', 'data-kind': kind }, term(word, label), body);
      return row;
    }

    const MAKERS = {
      number: (key, value, least) => {
        const input = el('input', { type: 'number', min: least, step: key === 'run.timeout_s' ? 'any' : '1', 'data-key': key, 'aria-label': key });
        input.value = value;
        input.addEventListener('change', () => { if (input.value !== '') change({ [key]: Number(input.value) }); });
        return input;
      },
      triple: (key, value) => el('div', { class: 'uspage-triple' }, Object.entries(value).map(([name, rows]) => el('label', null, MAKERS.number(`${key}.${name}`, rows, 0), name.replace('_', ' ')))),
      check: (key, value) => {
        const input = el('input', { type: 'checkbox', 'data-key': key, 'aria-label': key }); input.checked = value;
        input.addEventListener('change', () => change({ [key]: input.checked }));
        return input;
      },
      list: (key, value) => {
        const input = el('input', { type: 'text', inputmode: 'numeric', 'data-key': key, 'aria-label': key, placeholder: 'one' }); input.value = (value || []).join(', ');
        input.addEventListener('change', () => { const words = input.value.split(/[\s,;]+/).filter(Boolean); change({ [key]: words.length ? words.map(number) : null }); });
        return input;
      },
      pills: (key, value) => {
        const why = el('p', { class: 'uspage-why', 'aria-live': 'polite' });
        const made = state.seen.offers[key].map((o) => button(String(o.value), () => { if (o.why) why.textContent = o.why; else if (!same(o.value, value)) change(o.set || { [key]: o.value }); },
          { class: 'uspage-pill', 'aria-pressed': String(same(o.value, value)), 'aria-disabled': o.why ? 'true' : null, title: o.why || o.note || null, 'data-key': `${key}=${o.value}`, 'aria-label': `${key} ${o.value}` }));
        return el('div', { class: 'uspage-pillbox' }, el('div', { class: 'uspage-pills', role: 'group', 'aria-label': key }, made), why);
      },
      select: (key, value) => {
        const offers = state.seen.offers[key], select = el('select', { 'data-key': key, 'aria-label': key });
        if (!offers.some((o) => same(o.value, value))) offers.push({ value });
        offers.forEach((o, i) => { const option = el('option', { value: i, disabled: Boolean(o.why), title: o.why || o.note || null }, `${show(o.value)}${o.why ? ` – ${o.why}` : ''}`); option.selected = same(o.value, value); select.append(option); });
        select.addEventListener('change', () => { const o = offers[Number(select.value)]; change(o.set || { [key]: o.value }); });
        return select;
      },
      shards: (key, value) => {
        const mode = Array.isArray(value) ? 'list' : value, shards = state.seen.shards, most = Math.max(1, ...shards), few = shards.length <= 16;
        const why = el('p', { class: 'uspage-why', 'aria-live': 'polite' });
        const modes = el('div', { class: 'uspage-pills', role: 'group', 'aria-label': key }, state.seen.offers[key].map((o, i) => { const name = ['even', 'auto', 'list'][i]; return button(name, () => { if (o.why) why.textContent = o.why; else if (name !== mode) change({ [key]: o.value }); }, { class: 'uspage-pill', 'aria-pressed': String(name === mode), 'aria-disabled': o.why ? 'true' : null, title: o.why || null, 'data-key': `${key}=${name}` }); }));
        const bars = el('div', { class: 'uspage-bars' });
        shards.slice(0, 16).forEach((n, p) => {
          const bar = el('i', { style: `width:${(100 * n) / most}%;background:var(--usp-c${p % 8})` });
          let entry = el('span', { class: 'uspage-n' }, String(n));
          if (mode === 'list' && few) {
            entry = el('input', { type: 'number', min: 0, 'data-key': `${key}[${p}]`, 'aria-label': `rows of position ${p}` }); entry.value = n;
            entry.addEventListener('input', () => { bar.style.width = `${Math.min(100, (100 * Number(entry.value)) / most)}%`; });
            entry.addEventListener('change', () => { const next = [...shards]; next[p] = Number(entry.value); change({ [key]: next }); });
          }
          bars.append(el('span', { class: 'uspage-p' }, String(p)), el('span', { class: 'uspage-track' }, bar), entry);
        });
        const all = mode === 'list' && !few ? MAKERS.list(key, value) : null;
        return el('div', { class: 'uspage-shardbox' }, modes, why, bars, shards.length > 16 ? el('p', { class: 'uspage-why' }, `and ${shards.length - 16} more`) : null, all);
      },
      mask: (key, value) => {
        const masks = value === 'none' ? [] : Array.isArray(value) ? value : [value], put = (next) => change({ [key]: next.length ? (next.length === 1 ? next[0] : next) : 'none' });
        const box = el('div', { class: 'uspage-maskbox' }, thumbnail());
        masks.forEach((mask, i) => {
          const kind = Object.keys(mask)[0];
          const row = el('div', { class: 'uspage-maskrow' }, el('b', null, MASK_NAMES[kind]), button('×', () => put(masks.filter((_, n) => n !== i)), { class: 'uspage-quiet', 'aria-label': `Remove ${MASK_NAMES[kind]}`, 'data-key': `${key}[${i}]` }));
          for (const [name, type] of Object.entries(MASKS[kind])) {
            const now = mask[kind][name], input = el('input', { type: 'text', inputmode: 'numeric', 'data-key': `${key}[${i}].${name}`, 'aria-label': `${MASK_NAMES[kind]} ${name}` });
            input.value = type === 'pairs' ? (now || []).map((p) => p.join('–')).join(', ') : Array.isArray(now) ? now.join(', ') : now === null ? '' : now;
            if (type === 'maybe') input.placeholder = 'unlimited'; if (type === 'pairs') input.placeholder = '5–9';
            input.addEventListener('change', () => { const next = masks.slice(); next[i] = { [kind]: { ...mask[kind], [name]: read(type, input.value) } }; put(next); });
            row.append(el('label', null, name, input));
          }
          box.append(row);
        });
        const add = el('select', { 'data-key': `${key}+`, 'aria-label': 'Add a mask' }, el('option', { value: '' }, masks.length ? 'and another …' : 'none'), Object.entries(MASK_NAMES).map(([kind, name]) => el('option', { value: kind }, name)));
        add.addEventListener('change', () => { if (add.value) put([...masks, { [add.value]: fresh(add.value) }]); });
        box.append(add); return box;
      },
    };

    function fresh(kind) {
      const total = state.seen.normal.tokens.total, most = Math.max(0, total - Math.ceil(total / 8));
      return { key: { valid: [most] }, tail_pad: { start: most }, gap_pad: { start: Math.floor(total / 4), end: Math.floor(total / 3) }, window: { left: Math.floor(total / 3), right: 0 }, prefix_lm: { prefix: Math.floor(total / 6) }, dense: { density: 0.5, seed: 1 } }[kind];
    }
    const number = (word) => (/^-?\d+(\.\d+)?$/.test(word) ? Number(word) : word);
    function read(type, text) {
      const words = text.split(/[\s,;]+/).filter(Boolean);
      if (type === 'list') return words.map(number);
      if (type === 'pairs') return words.map((w) => w.split(/[–-]/).map(number));
      return type === 'maybe' && !words.length ? null : number(text.trim());
    }

    /** The S x S pattern: dark where every pair is allowed, pale where some are. */
    function thumbnail() {
      const mask = state.seen.mask; if (!mask) return null;
      const n = mask.size, canvas = el('canvas', { width: n, height: n, class: 'uspage-thumb', role: 'img', 'aria-label': 'Who may see whom: queries down, keys across' }), cx = canvas.getContext('2d');
      const css = getComputedStyle(root), all = css.getPropertyValue('--usp-accent'), none = css.getPropertyValue('--usp-slot');
      cx.fillStyle = none; cx.fillRect(0, 0, n, n); cx.fillStyle = all;
      mask.cells.forEach((row, y) => { for (let x = 0; x < n; x++) { if (row[x] === '0') continue; cx.globalAlpha = row[x] === '2' ? 1 : 0.45; cx.fillRect(x, y, 1, 1); } });
      return canvas;
    }

    // -- YAML --------------------------------------------------------------------------------------
    function lines() {
      const count = ui.editor.value.split('\n').length, bad = state.error && state.error.line;
      ui.gutter.replaceChildren(...Array.from({ length: Math.min(count, 2000) }, (_, i) => el('span', i + 1 === bad ? { class: 'uspage-bad' } : null, `${i + 1 === bad ? '▸' : ''}${i + 1}\n`)));
      ui.gutter.scrollTop = ui.editor.scrollTop;
      ui.editorNote.textContent = state.error ? state.error.message : 'The scenario file, as the command line reads it.'; ui.editorNote.dataset.bad = state.error ? 'yes' : 'no';
      ui.editor.setAttribute('aria-invalid', String(Boolean(state.error)));
    }
    on(ui.editor, 'input', () => { state.text = ui.editor.value; lines(); clearTimeout(typing); root.dataset.asking = 'yes'; typing = setTimeout(() => ask({ text: state.text }, { keep: true }), 300); });
    on(ui.editor, 'scroll', () => { ui.gutter.scrollTop = ui.editor.scrollTop; });

    // -- Whose replay --------------------------------------------------------------------------------
    const names = () => ({ sglang: `sglang ${state.seen.normal.release}`, unguarded: 'behind the guard', extended: 'ring-aware USP' });
    function policies() {
      const name = names();
      ui.policies.replaceChildren(...POLICIES.map((p) => {
        const outcome = state.outcomes[p] || (state.seen.predicted && state.seen.predicted[p]), sure = Boolean(state.outcomes[p]);
        return button([el('span', null, name[p]), outcome ? el('span', { class: 'uspage-outcome', 'data-outcome': outcome, 'data-sure': String(sure) }, `${MARKS[outcome] || ''} ${outcome}${sure ? '' : ' (predicted)'}`) : null], () => watch(p), { 'aria-pressed': String(state.show === p), 'data-policy': p });
      }));
    }
    async function watch(policy) {
      if (policy === state.show || !state.seen) return;
      if (state.error && !state.scenes[policy]) return;
      state.show = policy; policies();
      if (state.scenes[policy]) { load(state.scenes[policy], state.step); later(); return; }
      await ask({ text: state.text }, { keep: true, replace: true });
    }

    async function onPoint(point) {
      if (point.policy && point.policy !== state.show) await watch(point.policy);
      player.setToken(point.row); ui.playerPanel.scrollIntoView({ block: 'nearest' });
    }
    function onApplyFix(fix) {
      state.before = { address: state.seen.address, fix: fix.title };
      return change(fix.set, { run: true, step: 0, fix: true });
    }
    function before() {
      const b = state.before; ui.before.hidden = !b; if (!b) return;
      ui.before.replaceChildren(el('p', null, el('b', null, 'Changed: '), b.fix), button('Undo', () => { state.before = null; ask({ address: b.address }, { run: true, step: 0 }); }, { class: 'uspage-quiet' }));
    }

    // -- Runs --------------------------------------------------------------------------------------
    function status(text) {
      const running = Boolean(state.running);
      root.dataset.run = running ? 'running' : state.stale ? 'stale' : 'done';
      ui.cancel.hidden = !running; ui.run.hidden = running; ui.run.dataset.wanted = String(state.stale);
      if (text !== undefined) ui.status.textContent = text; else if (state.stale && !running) ui.status.textContent = state.seen && state.seen.limit ? state.seen.limit : 'Predicted; not run yet.';
      before();
    }

    async function run() {
      if (!state.seen || state.error || state.seen.limit) return;
      halt();
      const me = { ticket: token(), session: token(), source: null, event: null }; state.running = me; state.outcomes = {}; state.scenes = {};
      cards.begin(state.seen.normal, POLICIES); policies(); status('Waiting for the ranks …');
      const index = (config.dependencies || []).find((d) => d.api_name === 'stream');
      try {
        const answer = await fetch(`${api}/queue/join`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ data: [state.text, me.ticket], fn_index: index.id, session_hash: me.session, trigger_id: null, event_data: null }) });
        const body = await answer.json(); if (!answer.ok) throw new Error(body.detail || answer.status);
        me.event = body.event_id;
      } catch (error) { if (state.running === me) { state.running = null; status(`Not run: ${error.message || error}`); } return; }
      if (state.running !== me) { drop(me); return; }
      me.index = index.id; me.source = new EventSource(`${api}/queue/data?session_hash=${me.session}`);
      let text = '';
      me.source.onmessage = (message) => {
        const m = JSON.parse(message.data); if (state.running !== me) { me.source.close(); return; }
        if (m.msg === 'estimation') status(m.rank ? `Waiting: ${m.rank} ${m.rank > 1 ? 'runs' : 'run'} before this one.` : 'Next in line …');
        else if (m.msg === 'process_starts') status('Starting …');
        else if (m.msg === 'process_generating' && m.success) { text = patched(text, m.output.data[0]); if (text) hear(me, JSON.parse(text)); }
        else if (m.msg === 'process_completed' || m.msg === 'close_stream' || m.msg === 'unexpected_error' || m.msg === 'server_stopped') {
          me.source.close();
          if (m.success === false || m.msg === 'unexpected_error') finish(me, `Not run: ${(m.output && m.output.error) || m.message || 'the server stopped'}`); else finish(me);
        }
      };
      me.source.onerror = () => { me.source.close(); if (state.running === me) finish(me, 'The connection broke off; run it again.'); };
    }

    /** Gradio sends the first value whole, and later ones as changes to it. */
    function patched(before, sent) {
      if (typeof sent === 'string') return sent;
      for (const [action, , value] of sent) before = action === 'append' ? before + value : action === 'replace' ? value : before;
      return before;
    }

    function hear(me, told) {
      const { kind, policy } = told;
      if (kind === 'began') status(`Running ${names()[policy]} …`);
      else if (kind === 'result') {
        state.outcomes[policy] = told.outcome; state.scenes[policy] = told.scene; cards.result(policy, told.details); policies(); before();
        if (policy === state.show) load(told.scene, state.step);
      } else if (kind === 'failed') { state.outcomes[policy] = 'failed'; cards.failed(policy, told.text); policies(); }
      else if (kind === 'invalid') finish(me, told.text);
      else if (kind === 'cancelled') finish(me, 'Cancelled.');
      else if (kind === 'done') finish(me);
    }

    function finish(me, text) {
      if (state.running !== me) return;
      state.running = null; state.stale = Boolean(text);
      if (text) for (const p of POLICIES) if (!state.outcomes[p]) cards.failed(p, text);
      status(text || `Run on ${state.seen.normal.mesh.ulysses * state.seen.normal.mesh.ring} real ranks.`);
    }

    /** Nobody listens any more: take it out of the queue, and off the ranks. */
    function drop(me, now) {
      if (me.source) me.source.close();
      (now ? server.cancel(me.ticket) : server.leave(me.ticket)).catch(() => {});
      if (me.event) fetch(`${api}/cancel`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ session_hash: me.session, fn_index: me.index, event_id: me.event }) }).catch(() => {});
    }
    function halt(now) { const me = state.running; if (me) { state.running = null; drop(me, now); } }
    function cancel() { const me = state.running; if (!me) return; halt(true); state.stale = true; for (const p of POLICIES) if (!state.outcomes[p]) cards.failed(p, 'Cancelled.'); status('Cancelled.'); ui.run.focus(); }
    const token = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, '0')).join('');

    // -- The address, back and forth -------------------------------------------------------------------
    function query() {
      const kept = new URLSearchParams(location.search).get('__theme'), parts = [state.seen.address, `show=${state.show}`];
      if (state.step) parts.push(`step=${state.step}`);
      if (state.tab !== 'controls') parts.push(`tab=${state.tab}`);
      if (state.present) parts.push('present=1');
      if (kept) parts.push(`__theme=${encodeURIComponent(kept)}`);
      return parts.filter(Boolean).join('&');
    }
    function address(method) {
      if (!state.seen) return;
      const text = query(), url = location.pathname + (text.length > LONGEST_QUERY ? `#${text}` : `?${text}`);
      if (url !== location.pathname + location.search + location.hash) history[method](null, '', url);
    }
    function later() { clearTimeout(urlTimer); urlTimer = setTimeout(() => address('replaceState'), 200); }
    function here() { return location.hash.length > 1 && location.hash.includes('=') ? location.hash.slice(1) : location.search.slice(1); }
    function visit(first) {
      const text = here(), q = new URLSearchParams(text), step = Math.max(0, Math.min(1e6, Number.parseInt(q.get('step'), 10) || 0));
      tab(q.get('tab')); present(q.get('present') === '1', true);
      return ask({ address: text, show: POLICIES.includes(q.get('show')) ? q.get('show') : null }, { step, replace: true, run: true }).then(() => {
        if (first && !state.seen && state.error) { const said = state.error; return choose('varlen-ring').then(() => { tell([`The address holds no scenario that can be shown. ${said.message}`], []); }); }
        return null;
      });
    }
    on(global, 'popstate', () => { clearTimeout(urlTimer); visit(false); });

    async function share() {
      address('replaceState');
      try { await navigator.clipboard.writeText(location.href); ui.status.textContent = 'The link is in the clipboard.'; } catch { ui.status.textContent = `Copy it from the address bar: ${location.href}`; }
    }
    async function save() {
      if (!state.scene) return;
      let text;
      try { text = await server.export(state.scene); } catch (error) { ui.status.textContent = `Not saved: ${error.message || error}`; return; }
      const link = el('a', { href: URL.createObjectURL(new Blob([text], { type: 'text/html' })), download: `${state.seen.name}-${state.show}.html` });
      root.append(link); link.click(); link.remove(); setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }

    /** Our own icon: Gradio's is asked for at the server's root, which may be another program's. */
    function icon() {
      const squares = ['0072b2', 'c2700a', '00875f', 'b8528c'].map((c, i) => `<rect x="${1 + 8 * (i % 2)}" y="${1 + 8 * Math.floor(i / 2)}" width="6" height="6" rx="1.5" fill="%23${c}"/>`).join('');
      for (const link of document.querySelectorAll('link[rel~="icon"]')) link.remove();
      document.head.append(el('link', { rel: 'icon', href: `data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">${squares}</svg>` }));
    }

    // -- Manners -----------------------------------------------------------------------------------
    const isDark = () => document.body.classList.contains('dark');
    function flipTheme() { document.body.classList.toggle('dark'); paintTheme(); }
    function paintTheme() { ui.theme.textContent = isDark() ? 'Light' : 'Dark'; if (state.seen) controls(); }
    const themes = new MutationObserver(paintTheme); themes.observe(document.body, { attributes: true, attributeFilter: ['class'] });

    function present(yes, quiet) {
      state.present = yes; root.toggleAttribute('data-present', yes);
      const box = ui.mount.querySelector('.usp'); if (box) box.toggleAttribute('data-present', yes);
      global.dispatchEvent(new Event('resize')); if (!quiet) later();
    }
    on(document, 'keydown', (e) => {
      if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) { e.preventDefault(); run(); return; }
      if (e.target === ui.paste && e.key === 'Enter' && !e.shiftKey) { e.preventDefault(); find(); return; }
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);
      if (!typing && e.key.toLowerCase() === 'p' && !e.ctrlKey && !e.metaKey && !e.altKey) present(!state.present);
    });
    on(ui.paste, 'input', () => { ui.paste.rows = Math.min(6, ui.paste.value.split('\n').length); });
    on(global, 'pagehide', () => { const me = state.running; if (me) drop(me); });

    function destroy() { halt(); stop.abort(); themes.disconnect(); clearTimeout(urlTimer); clearTimeout(typing); player.destroy(); }
    host.uspApp = { state, player, ask, run, cancel, destroy, get busy() { return root.dataset.asking === 'yes' || Boolean(state.running); } };
    global.uspApp = host.uspApp;
    icon(); paintTheme(); tab('controls'); menu(); status('');
    visit(true);
    return host.uspApp;
  };
})(typeof window === 'undefined' ? globalThis : window);
