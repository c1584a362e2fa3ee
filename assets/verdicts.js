/* The verdicts of one scenario: USPVerdicts(root, options) shows what each policy's run came to.

   Fed with `details` (usp_viz/ui/details.py), one a run, as they end. No dependencies, no requests,
   text only: nothing that comes in is ever taken for markup.
   Sections: words and numbers · elements · cards · the error map · costs · the component. */
(function (global) {
  'use strict';

  // -- words and numbers ------------------------------------------------------------------------

  const OUTCOMES = {
    verified: ['✓', 'Verified', 'ok'], wrong: ['✗', 'Wrong', 'bad'], refused: ['⊘', 'Refused', 'bad'], crashed: ['✹', 'Crashed', 'bad'],
    timeout: ['◷', 'Timed out', 'bad'], invalid: ['!', 'Invalid', 'warn'], failed: ['!', 'Not run', 'warn'],
    waiting: ['…', 'Waiting', 'idle'], running: ['◌', 'Running', 'idle'], idle: ['○', 'Not run yet', 'idle'],
  };
  const POLICIES = ['sglang', 'unguarded', 'extended'];
  const TABS = [['map', 'Error map'], ['timeline', 'Timeline'], ['costs', 'Bytes & memory'], ['table', 'Table'], ['reproduce', 'Reproduce'], ['json', 'JSON']];
  const KINDS = { compute: 'computing', send: 'all-to-all, sending', copy: 'packing, unpacking', wait: 'waiting' };
  const FIXES = 3;

  const name = (policy, release) => ({ sglang: `sglang ${release || ''} says`.replace('  ', ' '), unguarded: 'What the guard hides', extended: 'Ring-aware USP' }[policy] || policy);
  const short = (policy) => ({ sglang: 'sglang', unguarded: 'behind the guard', extended: 'ring-aware' }[policy] || policy);
  const finite = (value) => typeof value === 'number' && Number.isFinite(value);

  function figure(value) {
    if (!finite(value)) return value === 'Infinity' || value === Infinity ? '∞' : value === '-Infinity' ? '−∞' : 'NaN';
    const size = Math.abs(value); if (!size) return '0';
    return (size >= 100 && size < 10000 ? value.toFixed(0) : size >= 0.01 && size < 100 ? value.toPrecision(2) : value.toExponential(1).replace('e+', 'e')).replace(/-/g, '−');
  }
  const count = (n) => Number(n).toLocaleString('en');
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? '' : 's'}`;
  const bytes = (n) => (n < 1000 ? `${n} B` : n < 1e6 ? `${Number((n / 1e3).toPrecision(3))} kB` : n < 1e9 ? `${Number((n / 1e6).toPrecision(3))} MB` : `${Number((n / 1e9).toPrecision(3))} GB`);
  const millis = (us) => `${Number((us / 1000).toPrecision(2))} ms`;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const written = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

  /** Leaves of a scenario by dotted key, prose aside. */
  function leaves(data, prefix, found) {
    for (const [key, value] of Object.entries(data || {})) {
      const dotted = prefix + key;
      if (['name', 'title', 'description', 'expect', 'policy'].includes(dotted)) continue;
      if (value && typeof value === 'object' && !Array.isArray(value)) leaves(value, `${dotted}.`, found); else found[dotted] = JSON.stringify(value);
    }
    return found;
  }
  function changes(before, after) {
    const a = leaves(before, '', {}), b = leaves(after, '', {});
    return [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((key) => a[key] !== b[key]).map((key) => [key, a[key], b[key]]);
  }

  // -- elements ---------------------------------------------------------------------------------

  /** An element; a child that is a string becomes text. */
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key === 'on') for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
      else if (key === 'style') for (const [property, v] of Object.entries(value)) node.style.setProperty(property, v);
      else node.setAttribute(key, value === true ? '' : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ''));
    return node;
  }
  function svg(tag, attributes, ...children) {
    const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  function table(caption, head, rows) {
    const right = head.map((_, i) => rows.every((row) => /^[\d.,∞NaN−–e+\-\s]*( ?(B|kB|MB|GB|ms))?$/.test(row[i])));
    const cell = (tag, text, i, more) => el(tag, { class: right[i] && i ? 'uspv-n' : null, ...more }, text);
    return el('div', { class: 'uspv-scroll', tabindex: 0, role: 'region', 'aria-label': caption }, el('table', null, el('caption', null, caption),
      el('thead', null, el('tr', null, head.map((text, i) => cell('th', text, i, { scope: 'col' })))),
      el('tbody', null, rows.map((row) => el('tr', null, row.map((text, i) => (i ? cell('td', text, i) : cell('th', text, i, { scope: 'row' }))))))));
  }
  function copyButton(text, label, announce) {
    const button = el('button', { type: 'button', class: 'uspv-small' }, label);
    button.addEventListener('click', async () => {
      let done = true;
      try { await navigator.clipboard.writeText(text); } catch {
        const area = el('textarea', { class: 'uspv-hide', 'aria-hidden': 'true' }); area.value = text; button.parentNode.append(area); area.select();
        done = document.execCommand('copy'); area.remove(); button.focus();
      }
      button.textContent = done ? 'Copied' : 'Select and copy'; announce(done ? 'Copied.' : 'Could not copy: select the text instead.');
      setTimeout(() => { button.textContent = label; }, 2000);
    });
    return button;
  }

  // -- cards ------------------------------------------------------------------------------------

  const facts = (d) => (d.result && d.result.error) || {};

  function errorBlock(error) { return el('pre', { class: 'uspv-said' }, el('code', null, error.class ? `${error.class}: ${error.message}` : String(error.message || ''))); }

  /** Why a rule ended the call, with this scenario's values; what is behind it; ways out. */
  function reasons(d, card, acts) {
    const error = facts(d), rule = d.rule || {}, parts = [];
    if (error.because && error.because.length) {
      parts.push(el('p', { class: 'uspv-label' }, 'Because'), el('ul', { class: 'uspv-facts' }, error.because.map((fact) => el('li', null, el('code', null, fact)))));
    }
    if (error.source) parts.push(el('p', { class: 'uspv-mute' }, el('code', null, error.source), error.release ? ` · release ${error.release}` : '', error.rule ? ` · rule ${error.rule}` : ''));
    if (rule.reason) parts.push(el('p', { class: 'uspv-label' }, rule.guard ? 'The reason given upstream' : 'Why'), el('p', null, sentence(rule.reason)));
    if (rule.behind) { card.behind = el('div', { class: 'uspv-behind' }); parts.push(card.behind); behind(card, rule.behind, rule.behind_is_seen); }
    const fixes = error.fixes || [];
    if (fixes.length) {
      const button = (fix) => el('li', null, el('button', { type: 'button', class: 'uspv-fix', 'data-fix': fix.id, on: { click: () => acts.fix(fix) } },
        el('b', null, 'Apply'), el('span', null, fix.title, el('code', null, Object.entries(fix.set || {}).map(([key, value]) => `${key} = ${written(value)}`).join(', ')))));
      parts.push(el('p', { class: 'uspv-label' }, 'Ways out'), el('ul', { class: 'uspv-fixes' }, fixes.slice(0, FIXES).map(button)));
      if (fixes.length > FIXES) parts.push(el('details', null, el('summary', null, `${fixes.length - FIXES} more`), el('ul', { class: 'uspv-fixes' }, fixes.slice(FIXES).map(button))));
    }
    const more = [['Who meets it', rule.who], ['Check before the call', rule.before], ['How not to meet it again', rule.prevent]].filter(([, text]) => text);
    if (more.length) parts.push(el('details', null, el('summary', null, rule.who ? 'Who meets it, and how not to' : 'How not to meet it'), el('dl', null, more.map(([term, text]) => [el('dt', null, term), el('dd', null, text)]))));
    return parts;
  }
  const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? '' : '.');

  function behind(card, text, isSeen) {
    card.behind.replaceChildren(el('p', { class: 'uspv-label' }, isSeen ? 'What we saw when we ran behind it' : 'What to expect behind it'), el('p', null, text));
  }

  function whereTable(error) {
    const said = error.where.some((w) => w.message), last = (w) => (said ? [w.message || '–'] : []);
    return table('Who was where', ['Rank', 'Ended', 'Step', 'Doing', ...(said ? ['Said'] : [])],
      error.where.map((w) => [String(w.rank), w.status, w.step === null ? '–' : String(w.step), w.op ? `${w.op} (${w.stage})` : 'before any step', ...last(w)]));
  }

  /** One bar a rank; `scale` is shared by all cards, so that their bars compare. */
  function bars(accuracy, scale) {
    const at = (value) => (finite(value) ? Math.max(0.015, Math.min(1, Math.log(Math.max(value, scale.low) / scale.low) / Math.log(scale.high / scale.low))) : 1);
    const line = `${at(accuracy.tolerance) * 100}%`;
    return el('div', { class: 'uspv-bars', style: { '--tolerance': line } },
      el('ul', { 'aria-label': 'Largest error of each rank' }, accuracy.per_rank.map((rank) => {
        const kind = !rank.rows ? 'none' : rank.wrong_rows ? 'wrong' : 'right';
        const said = !rank.rows ? 'no scored rows' : rank.wrong_rows ? `${rank.wrong_rows} of ${rank.rows} wrong` : 'right';
        return el('li', null, el('span', { class: 'uspv-rank' }, `rank ${rank.rank}`),
          el('span', { class: 'uspv-track', 'aria-hidden': 'true' }, rank.rows ? el('i', { 'data-kind': kind, style: { width: `${at(rank.max_abs) * 100}%` } }) : ''),
          el('span', { class: 'uspv-n' }, rank.rows ? figure(rank.max_abs) : '–'), el('span', { class: 'uspv-word', 'data-kind': kind, 'data-short': kind === 'wrong' ? `✗ ${rank.wrong_rows}/${rank.rows}` : kind === 'right' ? '✓' : '–' }, el('span', null, said)));
      })),
      el('p', { class: 'uspv-axis', 'aria-hidden': 'true' }, el('span', null, `tolerance ${figure(accuracy.tolerance)}`)));
  }

  function numbers(d, card) {
    const found = d.result.accuracy, parts = [];
    parts.push(el('p', { class: 'uspv-gist' }, el('span', null, found.wrong_rows ? `${count(found.wrong_rows)} of ${plural(found.rows, 'row')} wrong` : `${plural(found.rows, 'row')}, all within tolerance`),
      el('span', { class: 'uspv-mute' }, `tolerance ${figure(found.tolerance)}`)));
    for (const warning of d.result.warnings || []) parts.push(el('p', { class: 'uspv-warn' }, warning.text));
    card.bars = el('div'); card.thumb = el('canvas', { class: 'uspv-thumb', 'aria-hidden': 'true' }); parts.push(card.bars, card.thumb);
    if (d.pairs_text) parts.push(el('p', { class: 'uspv-mute' }, sentence(d.pairs_text)));
    return parts;
  }

  function footer(d, acts) {
    const timing = d.result.timing || {}, agrees = d.result.trace && d.result.trace.matches_prediction, parts = [];
    if (d.trace_text) parts.push(el('p', { class: agrees ? 'uspv-good' : 'uspv-warn' }, `${agrees ? '✓' : '✗'} ${d.trace_text}`));
    const time = finite(timing.wall_ms) ? `${Math.round(timing.wall_ms)} ms${timing.cold_start_ms ? `, ${Math.round(timing.cold_start_ms)} of them to start the ranks` : ', ranks warm'}` : '';
    const buttons = el('span', { class: 'uspv-buttons' });
    if (d.reproduce) buttons.append(copyButton(d.reproduce.command, 'Copy command', acts.say), copyButton(d.reproduce.python, 'Copy Python', acts.say));
    buttons.append(copyButton(JSON.stringify(d.result, null, 2), 'Copy JSON', acts.say));
    return el('div', { class: 'uspv-end' }, parts, el('div', { class: 'uspv-foot' }, el('span', { class: 'uspv-mute' }, time), buttons));
  }

  // -- the error map ----------------------------------------------------------------------------

  /** A map as it is drawn: columns with their rank, rows and document. */
  function readMap(data) {
    const binary = atob(data.codes), codes = Uint8Array.from(binary, (c) => c.charCodeAt(0)), columns = [], ranks = [];
    for (const block of data.blocks) {
      const rows = block.rows.flatMap(([start, n, step]) => Array.from({ length: n }, (_, i) => start + i * step));
      ranks.push({ rank: block.rank, from: columns.length, to: columns.length + block.columns });
      for (let c = 0; c < block.columns; c++) {
        const mine = rows.slice(c * data.rows_per_column, (c + 1) * data.rows_per_column);
        columns.push({ rank: block.rank, rows: mine, document: data.borders.filter((border) => border <= mine[0]).length, first: c === 0, index: ranks.length - 1 });
      }
    }
    return { data, codes, columns, ranks, heads: data.heads };
  }
  const valueOf = (map, code) => Math.pow(10, map.data.lowest + (code - 1) / map.data.per_decade);

  function cellText(map, column, head) {
    const c = map.columns[column], code = map.codes[column * map.heads + head];
    const copied = c.rows[0] < map.data.sequence[0] || c.rows[0] >= map.data.sequence[1];
    const rows = (copied ? 'replicated ' : '') + (c.rows.length > 1 ? `rows ${c.rows[0]} to ${c.rows[c.rows.length - 1]}` : `row ${c.rows[0]}`);
    const error = code === 0 ? 'padding, not scored' : code === 255 ? 'NaN or infinite, wrong' : code === 1 ? 'no error' : `error about ${figure(valueOf(map, code))}, ${code > map.data.limit ? 'wrong' : 'within tolerance'}`;
    return `Rank ${c.rank}, ${rows}, head ${head}${map.data.borders.length && !copied ? `, document ${c.document + 1}` : ''}: ${error}${c.rows.length > 1 ? ' (the worst of them)' : ''}`;
  }

  function mix(a, b, t) { return a.map((v, i) => Math.round(v + (b[i] - v) * t)); }
  function hex(text) { const n = parseInt(text.slice(1), 16); return [n >> 16, (n >> 8) & 255, n & 255]; }
  /** Right cells run from the panel to blue, wrong ones from amber to deep red (dark theme: to pale). */
  function colours(map, dark, range) {
    const right = dark ? [hex('#1b2736'), hex('#4d93cf')] : [hex('#e6eef6'), hex('#5d9bcb')];
    const wrong = dark ? [hex('#c4701a'), hex('#ffd9a8')] : [hex('#e08a2c'), hex('#7a1f0a')];
    const { limit } = map.data, { low, high } = range;
    const of = (code) => {
      if (code === 255) return dark ? [255, 255, 255] : [20, 20, 20];
      return code > limit ? mix(wrong[0], wrong[1], (code - limit - 1) / Math.max(1, high - limit - 1)) : mix(right[0], right[1], Math.max(0, (code - low) / Math.max(1, limit - low)));
    };
    return { css: (code) => `rgb(${of(code).join(' ')})`, low, high };
  }
  /** Codes from the smallest to the largest error of several maps, so that their colours compare. */
  function rangeOf(maps) {
    let low = 255, high = 0;
    for (const map of maps) {
      low = Math.min(low, map.data.limit - 3 * map.data.per_decade); high = Math.max(high, map.data.limit + map.data.per_decade);
      for (const code of map.codes) if (code > 1 && code < 255) { low = Math.min(low, code); high = Math.max(high, code); }
    }
    return { low, high };
  }

  /** All cells; `g` holds the size of a cell, `x(column)` and `top` where they are. */
  function paintCells(cx, map, colour, token, g, x) {
    const gapX = g.w > 7 ? 1 : g.w > 4 ? 0.5 : 0, gapY = g.h > 7 ? 1 : 0, stripes = new Path2D(), hollow = new Path2D();
    map.columns.forEach((column, c) => {
      for (let head = 0; head < map.heads; head++) {
        const code = map.codes[c * map.heads + head], px = x(c), py = g.top + head * g.h, pw = g.w - gapX, ph = g.h - gapY;
        if (!code) { hollow.rect(px + 0.5, py + 0.5, Math.max(1, pw - 1), Math.max(1, ph - 1)); continue; }
        cx.fillStyle = colour.css(code); cx.fillRect(px, py, pw, ph);
        if (code > map.data.limit && pw >= 5 && ph >= 5) { stripes.moveTo(px + 1.5, py + ph - 1.5); stripes.lineTo(px + pw - 1.5, py + 1.5); }
      }
    });
    cx.lineWidth = 1.25; cx.strokeStyle = token('--usp-panel'); cx.globalAlpha = 0.7; cx.stroke(stripes); cx.globalAlpha = 1;
    cx.lineWidth = 1; cx.strokeStyle = token('--usp-edge'); cx.setLineDash([1, 2]); cx.stroke(hollow); cx.setLineDash([]);
  }
  function sharpen(canvas, width, height) {
    const ratio = Math.min(2, global.devicePixelRatio || 1); canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`; const cx = canvas.getContext('2d'); cx.scale(ratio, ratio); return cx;
  }
  const look = (node) => { const style = getComputedStyle(node); return { em: parseFloat(style.fontSize), dark: style.colorScheme.includes('dark'), token: (key) => style.getPropertyValue(key).trim() }; };

  /** A map without words, for a card. */
  function thumbnail(canvas, map, range) {
    const width = canvas.parentNode ? canvas.parentNode.clientWidth : 0; if (!width || !map.columns.length) return;
    const { em, dark, token } = look(canvas), gap = 0.3 * em, w = (width - gap * (map.ranks.length - 1)) / map.columns.length, h = Math.max(1, Math.min(0.62 * em, (6 * em) / map.heads));
    const cx = sharpen(canvas, width, h * map.heads);
    paintCells(cx, map, colours(map, dark, range), token, { w, h, top: 0 }, (c) => c * w + map.columns[c].index * gap);
  }

  function mapPanel(d, map, range, acts) {
    const found = d.result.accuracy, canvas = el('canvas', { 'aria-hidden': 'true' });
    const readout = el('p', { class: 'uspv-readout', 'aria-live': 'polite' }, 'Point at a cell, or move over the map with the arrow keys; Enter shows the token in the player.');
    const stage = el('div', { class: 'uspv-map', tabindex: 0, role: 'application', 'aria-roledescription': 'error map',
      'aria-label': `Error of ${plural(map.columns.length, 'column')} of tokens by ${plural(map.heads, 'head')}: ${found.wrong_rows} of ${found.rows} rows wrong. Arrow keys move, Page Up and Page Down change rank, Enter shows the token.` }, canvas);
    const scale = el('div', { class: 'uspv-scale' });
    let at = null, g = null;

    function place() {
      const css = getComputedStyle(stage), em = parseFloat(css.fontSize), left = 3.4 * em, top = 1.7 * em, gap = Math.max(4, 0.5 * em);
      const space = stage.clientWidth - left - gap * (map.ranks.length - 1) - 2, n = Math.max(1, map.columns.length);
      const w = Math.max(2, Math.min(2.4 * em, Math.floor((space / n) * 4) / 4)), h = Math.max(5, Math.min(1.5 * em, (22 * em) / map.heads));
      g = { em, left, top, gap, w, h, width: Math.max(stage.clientWidth, left + n * w + gap * (map.ranks.length - 1) + 2), height: top + h * map.heads + 2 };
    }
    const x = (column) => g.left + column * g.w + map.columns[column].index * g.gap;
    function draw() {
      if (!stage.isConnected || !stage.clientWidth) return;
      place(); const { dark, token } = look(stage), cx = sharpen(canvas, g.width, g.height), gapX = g.w > 7 ? 1 : g.w > 4 ? 0.5 : 0, gapY = g.h > 7 ? 1 : 0;
      const colour = colours(map, dark, range), ink = token('--usp-ink'), muted = token('--usp-muted'), family = token('--usp-font');
      paintCells(cx, map, colour, token, g, x);
      cx.font = `${0.82 * g.em}px ${family}`; cx.textBaseline = 'middle'; let free = -1;
      for (const { rank, from, to } of map.ranks) {
        if (from === to) continue;
        const a = x(from), b = x(to - 1) + g.w; cx.strokeStyle = ink; cx.lineWidth = 1.25; cx.beginPath(); cx.moveTo(a, g.top - 3.5); cx.lineTo(b - gapX, g.top - 3.5); cx.stroke();
        const label = [`rank ${rank}`, String(rank)].find((text) => cx.measureText(text).width < b - a) || String(rank);
        if (a > free) { cx.fillStyle = ink; cx.textAlign = 'left'; cx.fillText(label, a, 0.7 * g.em); free = a + cx.measureText(label).width + 4; }
      }
      cx.fillStyle = muted; cx.textAlign = 'right'; const every = Math.ceil((1.1 * g.em) / g.h);
      for (let head = 0; head < map.heads; head += every) cx.fillText(head ? String(head) : 'head 0', g.left - 6, g.top + (head + 0.5) * g.h);
      cx.strokeStyle = ink; cx.lineWidth = 1.5; cx.setLineDash([4, 3]);
      map.columns.forEach((column, c) => {
        if (!column.first && column.document !== map.columns[c - 1].document) { cx.beginPath(); cx.moveTo(x(c) - gapX / 2, g.top - 6); cx.lineTo(x(c) - gapX / 2, g.height); cx.stroke(); }
      });
      cx.setLineDash([]);
      if (at) {
        const px = x(at[0]) - 1.5, py = g.top + at[1] * g.h - 1.5, pw = g.w - gapX + 3, ph = g.h - gapY + 3;
        cx.lineWidth = 4; cx.strokeStyle = token('--usp-panel'); cx.strokeRect(px, py, pw, ph); cx.lineWidth = 2; cx.strokeStyle = token('--usp-accent'); cx.strokeRect(px, py, pw, ph);
      }
      legend(colour);
    }
    function legend(colour) {
      const { limit } = map.data, ramp = (from, to) => Array.from({ length: 6 }, (_, i) => colour.css(Math.round(from + ((to - from) * i) / 5))).join(', ');
      const wrong = map.codes.some((code) => code > limit && code < 255), part = (kind, from, to, label) => el('span', null, el('i', { 'data-kind': kind, style: from === null ? {} : { 'background-image': `linear-gradient(to right, ${ramp(from, to)})` } }), label);
      scale.replaceChildren(part('right', colour.low, limit, `${figure(valueOf(map, colour.low))} to the tolerance, ${figure(map.data.tolerance)}`),
        ...(wrong ? [part('wrong', limit + 1, colour.high, `striped: wrong, up to ${colour.high >= 254 ? 'huge' : figure(valueOf(map, colour.high))}`)] : []),
        ...(map.codes.includes(255) ? [part('nan', null, null, 'NaN or infinite')] : []), ...(map.codes.includes(0) ? [part('pad', null, null, 'padding, not scored')] : []),
        ...(map.data.borders.length ? [part('document', null, null, 'document border')] : []), el('span', null, 'log scale'),
        ...(map.data.rows_per_column > 1 ? [el('span', null, `a column stands for ${map.data.rows_per_column} rows and shows the worst`)] : []));
    }
    function move(to, quiet) {
      at = to; draw(); if (!to) return;
      if (!quiet) readout.textContent = cellText(map, to[0], to[1]);
      const left = x(to[0]); if (left < stage.scrollLeft + g.left) stage.scrollLeft = left - g.left; else if (left + g.w > stage.scrollLeft + stage.clientWidth) stage.scrollLeft = left + g.w - stage.clientWidth + 8;
    }
    function hit(e) {
      if (!g) return null; const r = canvas.getBoundingClientRect(), px = e.clientX - r.left, py = e.clientY - r.top, head = Math.floor((py - g.top) / g.h);
      const c = map.columns.findIndex((_, i) => px >= x(i) && px < x(i) + g.w);
      return c < 0 || head < 0 || head >= map.heads ? null : [c, head];
    }
    const point = () => at && acts.point({ row: map.columns[at[0]].rows[0], head: at[1], rank: map.columns[at[0]].rank });
    function keys(e) {
      if (!map.columns.length || e.altKey || e.ctrlKey || e.metaKey) return;
      const [c, head] = at || [0, 0], last = map.columns.length - 1, block = map.columns[c].index, full = map.ranks.map((r, i) => [r, i]).filter(([r]) => r.to > r.from);
      const rank = (by) => { const next = by > 0 ? full.find(([, i]) => i > block) : [...full].reverse().find(([, i]) => i < block); return next ? next[0].from : c; };
      const to = { ArrowRight: [Math.min(last, c + 1), head], ArrowLeft: [Math.max(0, c - 1), head], ArrowDown: [c, Math.min(map.heads - 1, head + 1)], ArrowUp: [c, Math.max(0, head - 1)],
        Home: [0, head], End: [last, head], PageDown: [rank(1), head], PageUp: [rank(-1), head] }[e.key];
      if (to) { move(at ? to : [c, head]); e.preventDefault(); e.stopPropagation(); } else if (e.key === 'Enter' || e.key === ' ') { point(); e.preventDefault(); e.stopPropagation(); }
    }
    stage.addEventListener('keydown', keys);
    stage.addEventListener('focus', () => { if (!at && map.columns.length && stage.matches(':focus-visible')) move([0, 0]); });
    stage.addEventListener('pointermove', (e) => { const to = hit(e); if (to) move(to); });
    stage.addEventListener('click', (e) => { const to = hit(e); if (to) { move(to); point(); } });
    const worst = map.data.largest.length ? [el('p', { class: 'uspv-label' }, 'Largest errors, to see in the player'), el('ul', { class: 'uspv-worst' }, map.data.largest.map((cell) => el('li', null,
      el('button', { type: 'button', on: { click: () => { const c = map.columns.findIndex((col) => col.rank === cell.rank && col.rows.includes(cell.row)); move([c, cell.head]); acts.point({ row: cell.row, head: cell.head, rank: cell.rank }); } } },
        el('b', null, figure(cell.value)), ` row ${cell.row} · head ${cell.head} · rank ${cell.rank}`))))] : [];
    const grid = el('details', null, el('summary', null, 'The map as a table: largest error by rank and head'));
    grid.addEventListener('toggle', () => {
      if (!grid.open || grid.children.length > 1) return;
      const worstOf = ({ from, to }, head) => { let code = 0; for (let c = from; c < to; c++) code = Math.max(code, map.codes[c * map.heads + head]); return code; };
      const said = (code) => (code === 0 ? '–' : code === 255 ? 'NaN, wrong' : `${code === 1 ? '0' : figure(valueOf(map, code))}${code > map.data.limit ? ', wrong' : ''}`);
      grid.append(table('Largest error by rank and head', ['Rank', ...Array.from({ length: map.heads }, (_, head) => `head ${head}`)], map.ranks.map((r) => [`rank ${r.rank}`, ...Array.from({ length: map.heads }, (_, head) => said(worstOf(r, head)))])));
    });
    const node = el('div', { class: 'uspv-stack' }, el('div', { class: 'uspv-split' }, el('div', null, stage, readout, scale), el('div', null, worst)), grid);
    return { node, draw, get at() { return at; } };
  }

  // -- costs ------------------------------------------------------------------------------------

  let drawn = 0;
  function lanesFigure(title, lanes, ranks, stages, end, width) {
    const id = `uspv-hatch-${drawn++}`, rowH = 22, left = 58, right = 12, height = ranks * (rowH + 6) + 30, at = (us) => left + (us / end) * (width - left - right);
    const picture = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${title}: a row a rank, ${millis(end)} in all; the same as totals in the table below` });
    picture.append(svg('defs', {}, svg('pattern', { id, width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
      svg('rect', { width: 6, height: 6, class: 'uspv-send' }), svg('rect', { width: 2, height: 6, class: 'uspv-gap' }))));
    for (let rank = 0; rank < ranks; rank++) {
      const label = svg('text', { x: 0, y: rank * (rowH + 6) + 15 }); label.textContent = `rank ${rank}`;
      picture.append(label, svg('rect', { x: left, y: rank * (rowH + 6), width: width - left - right, height: rowH, rx: 3, class: 'uspv-row' }));
    }
    const tickStep = [1, 2, 5].flatMap((n) => [0.01, 0.1, 1, 10, 100, 1000, 10000].map((p) => n * p)).sort((a, b) => a - b).find((ms) => end / 1000 / ms <= (width - left) / 80) || end / 1000;
    for (let ms = 0; ms * 1000 <= end; ms += tickStep) {
      const x = at(ms * 1000), y = ranks * (rowH + 6), tick = svg('text', { x, y: y + 18, 'text-anchor': ms ? 'middle' : 'start', class: 'uspv-tick' }); tick.textContent = `${Number(ms.toPrecision(3))}${ms ? '' : ' ms'}`;
      picture.append(svg('line', { x1: x, x2: x, y1: 0, y2: y + 4, class: 'uspv-grid' }), tick);
    }
    for (const [rank, step, kind, what, start, stop] of lanes) {
      const over = what === 'send' && (stages[step] || '').startsWith('hop'), y = rank * (rowH + 6) + (over ? rowH * 0.55 : kind === 'wait' ? rowH / 2 - 2 : 2), h = over ? rowH * 0.4 : kind === 'wait' ? 4 : rowH - 4;
      const rect = svg('rect', { x: at(start), y, width: Math.max(0.75, at(stop) - at(start)), height: h, class: `uspv-${kind}`, ...(kind === 'send' ? { style: `fill: url(#${id})` } : {}) });
      const tip = svg('title'); tip.textContent = `rank ${rank} · ${what} · ${stages[step] || `step ${step}`} · ${millis(stop - start)}`; rect.append(tip); picture.append(rect);
    }
    return el('figure', null, el('figcaption', null, title), picture);
  }

  function timelinePanel(d, space) {
    const width = Math.max(320, Math.min(640, space > 720 ? space / 2 : space));
    const spent = d.spent, ranks = d.result.world;
    if (!spent.measured.length) return none('No rank attended anything in this run, so there are no times. The verdict says how far each rank came.');
    const end = (lanes) => Math.max(1, ...lanes.map((lane) => lane[5])), totals = (lanes, rank, kind) => millis(sum(lanes.filter((l) => l[0] === rank && l[2] === kind).map((l) => l[5] - l[4])));
    const kinds = Object.keys(KINDS), head = ['Rank', ...kinds.map((kind) => `${KINDS[kind]}, measured`), ...['compute', 'send', 'wait'].map((kind) => `${KINDS[kind]}, predicted`)];
    const rows = Array.from({ length: ranks }, (_, rank) => [`rank ${rank}`, ...kinds.map((kind) => totals(spent.measured, rank, kind)), ...['compute', 'send', 'wait'].map((kind) => totals(spent.predicted, rank, kind))]);
    return el('div', { class: 'uspv-stack' }, el('ul', { class: 'uspv-key' }, kinds.map((kind) => el('li', null, el('i', { 'data-kind': kind }), KINDS[kind]))),
      el('div', { class: 'uspv-two' }, lanesFigure('Measured on the real ranks', spent.measured, ranks, spent.stages, end(spent.measured), width), lanesFigure('Predicted', spent.predicted, ranks, spent.stages, end(spent.predicted), width)),
      el('p', { class: 'uspv-mute' }, `${spent.machine}. An all-to-all as measured includes waiting for the peers; in the prediction, a bar at the foot of a row is a block on its way while the rank computes. Each picture has its own scale.`),
      el('details', null, el('summary', null, 'The same as a table'), table('Time by rank', head, rows)));
  }

  function pairBars(title, measured, predicted, note, action) {
    const most = Math.max(1, ...measured, ...predicted), same = measured.length && measured.every((value, i) => value === predicted[i]);
    const bar = (kind, value) => el('div', null, el('span', { class: 'uspv-track', 'aria-hidden': 'true' }, el('i', { 'data-kind': kind, style: { width: `${(100 * value) / most}%` } })), el('span', { class: 'uspv-n' }, bytes(value)), el('span', { class: 'uspv-mute' }, kind));
    return el('section', null, el('h4', null, title), el('p', { class: same ? 'uspv-good' : 'uspv-mute' }, same ? '✓ measured = predicted, to the byte' : note), action,
      el('ul', { class: 'uspv-pairs' }, (predicted.length ? predicted : measured).map((_, rank) => el('li', null, el('span', { class: 'uspv-rank' }, `rank ${rank}`), el('div', null, ...(measured.length ? [bar('measured', measured[rank])] : []), ...(predicted.length ? [bar('predicted', predicted[rank])] : []))))));
  }
  function costsPanel(d, acts) {
    const { sent, memory } = d.spent, ask = acts.measure && memory.predicted.length && !memory.measured.length;
    return el('div', { class: 'uspv-two' }, pairBars('Bytes sent to other ranks', sent.measured, sent.predicted, 'Measured and predicted bytes differ: the run went another way than the plan.'),
      memory.predicted.length ? pairBars('Peak memory of tensors', memory.measured, memory.predicted, memory.measured.length ? 'Predicted counts what a lean implementation must hold at once; kernels may hold more or less.' : 'Predicted: what a lean implementation must hold at once. Not measured: counting makes a run slower.', ask ? el('button', { type: 'button', class: 'uspv-small', 'data-do': 'measure', on: { click: acts.measure } }, 'Run once more and measure') : '') : none('No output, so no memory to compare.'));
  }
  const none = (text) => el('p', { class: 'uspv-none' }, text);

  function tablePanel(d) {
    const error = facts(d), { accuracy } = d.result, { sent, memory } = d.spent;
    if (!accuracy) return el('div', { class: 'uspv-stack' }, error.where && error.where.length ? whereTable(error) : none('No rank returned an output.'), table('Bytes sent', ['Rank', 'Bytes sent', 'Predicted'], sent.measured.map((value, rank) => [`rank ${rank}`, count(value), count(sent.predicted[rank] || 0)])));
    return table('Every rank', ['Rank', 'Scored rows', 'Wrong rows', 'Largest error', 'Bytes sent', 'Predicted', 'Peak memory', 'Predicted'].map((t, i) => (i === 5 ? 'Bytes predicted' : i === 7 ? 'Memory predicted' : t)),
      accuracy.per_rank.map((rank) => [`rank ${rank.rank}`, count(rank.rows), count(rank.wrong_rows), figure(rank.max_abs), count(sent.measured[rank.rank]), count(sent.predicted[rank.rank]), memory.measured.length ? count(memory.measured[rank.rank]) : '–', memory.predicted.length ? count(memory.predicted[rank.rank]) : '–']));
  }
  function codePanel(parts, announce) {
    return el('div', { class: 'uspv-stack' }, parts.map(([label, text]) => el('section', null, el('div', { class: 'uspv-foot' }, el('h4', null, label), copyButton(text, 'Copy', announce)), el('pre', { class: 'uspv-code', tabindex: 0, 'aria-label': label }, el('code', null, text)))));
  }

  // -- the component ----------------------------------------------------------------------------

  let made = 0;
  global.USPVerdicts = function (root, given) {
    const options = given || {}, id = `uspv-${made++}`, stop = new AbortController();
    const live = el('p', { class: 'uspv-hide', 'aria-live': 'polite', role: 'status' });
    const rail = el('div', { class: 'uspv-rail' }), before = el('details', { class: 'uspv-before', hidden: true }), more = el('div', { class: 'uspv-more', hidden: true });
    const box = el('div', { class: 'uspv', 'data-state': 'idle' }, live, rail, before, more);
    root.replaceChildren(box);
    let cards = new Map(), scenario = null, chosen = null, picked = false, tab = 'map', panel = null, generation = 0, previous = null, applied = null, lastPoint = null;
    const say = (text) => { live.textContent = ''; live.textContent = text; };
    const acts = {
      say,
      fix: (fix) => { applied = fix; say(`Applying: ${fix.title}`); if (options.onApplyFix) options.onApplyFix(fix); },
      point: (point) => { lastPoint = point; if (options.onPoint) options.onPoint(point); },
    };

    if (options.onMeasure) acts.measure = () => options.onMeasure(chosen);

    function newCard(policy) {
      const title = `${id}-${generation}-${policy}`, heading = el('h3', { id: title }, name(policy, scenario && scenario.release)), verdict = el('p', { class: 'uspv-verdict' }), body = el('div', { class: 'uspv-body' });
      const node = el('article', { class: 'uspv-card', 'aria-labelledby': title, 'data-policy': policy }, heading, verdict, body);
      const card = { policy, node, heading, verdict, body, status: 'idle', details: null, text: '' };
      show(card, 'idle'); return card;
    }
    function show(card, status, text) {
      card.status = status; card.text = text || ''; const [mark, word, tone] = OUTCOMES[status] || OUTCOMES.failed;
      const found = card.details && card.details.result && card.details.result.accuracy;
      const silent = status === 'wrong' ? ', silently' : '', size = found ? `max |Δ| ${figure(found.max_abs)}` : '';
      card.node.dataset.outcome = status; card.node.dataset.tone = tone; card.node.setAttribute('aria-busy', String(status === 'waiting' || status === 'running'));
      card.verdict.replaceChildren(el('span', { class: 'uspv-mark', 'aria-hidden': 'true' }, mark), el('span', null, word + silent), ...(size ? [el('small', null, size)] : []));
    }
    const old = (card) => previous && previous.get(card.policy);

    function fill(card) {
      const d = card.details, error = facts(d), outcome = d.result.outcome; show(card, outcome);
      if (d.result.release) card.heading.textContent = name(card.policy, d.result.release);
      const parts = [], was = old(card);
      if (was && was.details) { const [mark, word] = OUTCOMES[was.status]; parts.push(el('p', { class: 'uspv-was' }, `before: ${mark} ${word.toLowerCase()}`)); }
      if (d.result.error) parts.push(errorBlock(error));
      if (d.result.accuracy) parts.push(...numbers(d, card));
      if (d.result.error) {
        const first = cards.get('sglang'), same = card.policy === 'unguarded' && first && first.details && facts(first.details).message === error.message && d.rule && !d.rule.guard;
        if (same) parts.push(el('p', null, 'The same as without skipping: this is none of the three ring guards.')); else parts.push(...reasons(d, card, acts));
        if (error.where && error.where.length && outcome !== 'refused') parts.push(whereTable(error));
        if (error.limit && outcome === 'invalid') parts.push(el('p', null, `${error.key || ''}: ${error.limit}`));
        if (!d.rule) for (const warning of d.result.warnings || []) parts.push(el('p', { class: 'uspv-warn' }, warning.text));
      }
      card.body.replaceChildren(...parts, footer(d, acts));
    }
    function rescale() {
      const seen = [...cards.values()].map((card) => card.details && card.details.result.accuracy).filter(Boolean); if (!seen.length) return;
      const low = Math.min(...seen.map((a) => a.tolerance)) / 1000, values = seen.flatMap((a) => [a.tolerance, ...a.per_rank.map((rank) => rank.max_abs).filter(finite)]);
      const scale = { low, high: Math.max(10 * Math.max(...seen.map((a) => a.tolerance)), ...values) };
      for (const card of cards.values()) if (card.bars && card.details.result.accuracy) card.bars.replaceChildren(bars(card.details.result.accuracy, scale));
    }

    // Before and after --------------------------------------------------------------------------
    function keep() {
      const done = [...cards.values()].filter((card) => card.details); previous = null;
      if (!done.length) return;
      previous = cards; before.hidden = true; before.open = false;
      const keptRail = el('div', { class: 'uspv-rail' }, [...cards.values()].map((card) => card.node));
      before.replaceChildren(el('summary'), keptRail);
    }
    function compare(card) {
      if (!previous) return;
      const then = [...previous.values()].find((c) => c.details && c.details.result.scenario); if (!then || !card.details.result.scenario) return;
      const found = changes(then.details.result.scenario, card.details.result.scenario);
      if (!found.length) { previous = null; before.hidden = true; before.replaceChildren(); fill(card); return; }
      const what = found.slice(0, 3).map(([key, a, b]) => `${key} ${a === undefined ? 'unset' : a} → ${b === undefined ? 'unset' : b}`).join(', ') + (found.length > 3 ? `, ${found.length - 3} more` : '');
      const outcomes = [...previous.values()].filter((c) => c.details).map((c) => el('span', { 'data-tone': (OUTCOMES[c.status] || OUTCOMES.failed)[2] }, `${short(c.policy)} ${(OUTCOMES[c.status] || OUTCOMES.failed)[0]} ${(OUTCOMES[c.status] || OUTCOMES.failed)[1].toLowerCase()}`));
      before.querySelector('summary').replaceChildren(el('b', null, before.fix ? `Before “${before.fix.title}”` : 'Before'), ...outcomes, el('span', { class: 'uspv-mute' }, `changed since: ${what}`)); before.hidden = false;
    }

    // The tabs below ------------------------------------------------------------------------------
    const runs = el('div', { class: 'uspv-runs', role: 'radiogroup', 'aria-label': 'Which run the tabs show' }), tabs = el('div', { class: 'uspv-tabs', role: 'tablist', 'aria-label': 'Details of the run' });
    const sheet = el('div', { class: 'uspv-panel', role: 'tabpanel', id: `${id}-panel`, tabindex: 0 });
    const tabButtons = TABS.map(([key, label]) => el('button', { type: 'button', role: 'tab', id: `${id}-tab-${key}`, 'aria-controls': `${id}-panel`, 'data-tab': key, on: { click: () => openTab(key) } }, label));
    tabs.append(...tabButtons); more.append(el('div', { class: 'uspv-bar' }, tabs, runs), sheet);
    function rove(buttons, e, act) {
      const at = buttons.indexOf(document.activeElement), by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      const to = by ? (at + by + buttons.length) % buttons.length : e.key === 'Home' ? 0 : e.key === 'End' ? buttons.length - 1 : -1;
      if (at < 0 || to < 0) return; e.preventDefault(); e.stopPropagation(); buttons[to].focus(); act(buttons[to]);
    }
    tabs.addEventListener('keydown', (e) => rove(tabButtons, e, (button) => openTab(button.dataset.tab)));
    runs.addEventListener('keydown', (e) => rove([...runs.children], e, (button) => choose(button.dataset.policy)));
    function openTab(key) { if (!TABS.some(([known]) => known === key)) return; tab = key; paint(); if (options.onTab) options.onTab(key); }
    function choose(policy) { if (!cards.get(policy) || !cards.get(policy).details) return; chosen = policy; picked = true; paint(); const button = runs.querySelector(`[data-policy="${CSS.escape(policy)}"]`); if (runs.contains(document.activeElement) && button) button.focus(); }
    const range = () => rangeOf([...cards.values()].map((card) => card.map).filter(Boolean));
    function thumbs() { const shared = range(); for (const card of cards.values()) if (card.map && card.thumb) thumbnail(card.thumb, card.map, shared); }
    const interest = ['wrong', 'verified', 'crashed', 'timeout', 'refused', 'invalid', 'failed'];
    function paint() {
      const done = [...cards.values()].filter((card) => card.details); more.hidden = !done.length; if (!done.length) { panel = null; return; }
      if (!picked || !done.some((card) => card.policy === chosen)) chosen = [...done].sort((a, b) => interest.indexOf(a.status) - interest.indexOf(b.status))[0].policy;
      const focus = runs.contains(document.activeElement) ? document.activeElement.dataset.policy : null;
      runs.replaceChildren(...done.map((card) => el('button', { type: 'button', role: 'radio', 'aria-checked': String(card.policy === chosen), tabindex: card.policy === chosen ? 0 : -1, 'data-policy': card.policy, on: { click: () => choose(card.policy) } }, short(card.policy))));
      if (focus) { const again = [...runs.children].find((button) => button.dataset.policy === focus); if (again) again.focus(); }
      for (const button of tabButtons) { const on = button.dataset.tab === tab; button.setAttribute('aria-selected', String(on)); button.tabIndex = on ? 0 : -1; }
      const d = cards.get(chosen).details; panel = null; sheet.setAttribute('aria-labelledby', `${id}-tab-${tab}`); sheet.dataset.tab = tab;
      const make = {
        map: () => { if (!d.map) return none(`${short(chosen)}: no output to compare, so there is no map.${done.some((card) => card.details.map) ? ' Choose another run above.' : ''}`); panel = mapPanel(d, cards.get(chosen).map, range(), acts); return panel.node; },
        timeline: () => (d.spent ? timelinePanel(d, sheet.clientWidth - 32) : none('Nothing ran.')), costs: () => (d.spent ? costsPanel(d, acts) : none('Nothing ran.')), table: () => (d.spent ? tablePanel(d) : none('Nothing ran.')),
        reproduce: () => (d.reproduce ? codePanel([['Shell', d.reproduce.command], ['Python', d.reproduce.python]], say) : none('Nothing to reproduce.')), json: () => codePanel([['Result', JSON.stringify(d.result, null, 2)]], say),
      }[tab];
      sheet.replaceChildren(make()); if (panel) panel.draw();
    }

    // What the page calls ---------------------------------------------------------------------------
    function begin(asked, policies) {
      if (cards.size) keep();
      before.fix = applied; applied = null; scenario = asked || null; generation++; cards = new Map(); lastPoint = null;
      for (const policy of policies || POLICIES) cards.set(policy, newCard(policy));
      rail.replaceChildren(...[...cards.values()].map((card) => card.node)); box.dataset.state = 'running'; box.dataset.run = String(generation);
      [...cards.values()].forEach((card, i) => { show(card, i ? 'waiting' : 'running'); card.body.replaceChildren(el('p', { class: 'uspv-mute' }, i ? 'Its turn comes.' : 'The ranks are at it.')); });
      paint();
    }
    function waiting(text) { for (const card of cards.values()) if (card.status === 'waiting' || card.status === 'running') { show(card, 'waiting', text); card.body.replaceChildren(el('p', { class: 'uspv-mute' }, text)); } if (text) say(text); }
    function ended(card, announced) {
      say(announced); const next = [...cards.values()].find((c) => c.status === 'waiting');
      if (next) { show(next, 'running'); next.body.replaceChildren(el('p', { class: 'uspv-mute' }, 'The ranks are at it.')); }
      else if (![...cards.values()].some((c) => c.status === 'running')) box.dataset.state = 'done';
      paint();
    }
    function result(policy, details) {
      const d = typeof details === 'string' ? JSON.parse(details) : details; let card = cards.get(policy);
      if (!card) { card = newCard(policy); cards.set(policy, card); rail.append(card.node); }
      card.details = d; card.map = d.map ? readMap(d.map) : null; fill(card); compare(card); rescale(); thumbs();
      const refused = cards.get('sglang'), seen = cards.get('unguarded');
      if (refused && refused.behind && seen && seen.details && seen.details.seen) behind(refused, seen.details.seen, true);
      ended(card, `${name(policy, d.result.release)}: ${(OUTCOMES[d.result.outcome] || OUTCOMES.failed)[1]}. ${d.gist || ''}`);
    }
    function failed(policy, text) {
      let card = cards.get(policy); if (!card) { card = newCard(policy); cards.set(policy, card); rail.append(card.node); }
      show(card, 'failed', text);
      card.body.replaceChildren(el('pre', { class: 'uspv-said' }, el('code', null, String(text))), ...(options.onRunAgain ? [el('button', { type: 'button', class: 'uspv-small uspv-again', on: { click: () => options.onRunAgain() } }, 'Run again')] : []));
      ended(card, `${name(policy)}: not run. ${text}`);
    }
    function clear() {
      cards = new Map(POLICIES.map((policy) => [policy, newCard(policy)])); previous = null; applied = null; scenario = null; picked = false; before.hidden = true; before.replaceChildren(); rail.replaceChildren(...[...cards.values()].map((card) => card.node));
      for (const card of cards.values()) card.body.replaceChildren(el('p', { class: 'uspv-mute' }, { sglang: 'Refuses where that release refuses.', unguarded: 'Runs the path behind the guard.', extended: 'Runs all of it, ring-aware.' }[card.policy]));
      box.dataset.state = 'idle'; paint();
    }

    const redraw = () => { if (panel) panel.draw(); thumbs(); };
    const theme = new MutationObserver(redraw), size = new ResizeObserver(redraw);
    theme.observe(document.body, { attributes: true, attributeFilter: ['class', 'data-theme'] }); theme.observe(document.documentElement, { attributes: true, attributeFilter: ['class', 'data-theme'] });
    size.observe(box); matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw, { signal: stop.signal });
    function destroy() { stop.abort(); theme.disconnect(); size.disconnect(); }
    clear();

    return {
      begin, result, failed, clear, waiting, openTab, choose, destroy,
      get state() {
        const outcome = {}, status = {}; for (const card of cards.values()) { status[card.policy] = card.status; if (card.details) outcome[card.policy] = card.details.result.outcome; }
        return { status: box.dataset.state, run: generation, cards: status, outcomes: outcome, tab, chosen, before: !before.hidden, point: lastPoint, cell: panel && panel.at };
      },
    };
  };
})(typeof window === 'undefined' ? globalThis : window);
