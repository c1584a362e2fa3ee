/* The player of a replay: USPPlayer(root, options) draws a scene (usp_viz/views/scene.py) on a canvas.

   No dependencies, no requests, no HTML from data. It lives in gr.HTML and in a stand-alone page.
   Sections: reading a scene · what to draw when · where things are · painting · about a token · the
   player itself (elements, controls, keys, handle). */
(function (global) {
  'use strict';

  // -- reading a scene --------------------------------------------------------------------------

  const HEADS_BASE = 8192,
    LANES = ['Q', 'K/V', 'next', 'out'];
  const Q = 0,
    KV = 1,
    NEXT = 2,
    OUT = 3,
    PARTIAL = 3,
    OUTPUT = 4;
  const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
  const COLOURS = 8;

  function column(packed) {
    if (Array.isArray(packed)) return packed;
    const out = [],
      runs = packed.runs;
    for (let i = 0; i < runs.length; i += 3) for (let n = 0; n < runs[i + 1]; n++) out.push(runs[i] + n * runs[i + 2]);
    return out;
  }

  function cells(text, count) {
    const out = new Uint8Array(count);
    if (text[0] === '~') {
      const runs = text.slice(1).split(',').map(Number);
      for (let i = 0, at = 0; i < runs.length; i += 2) {
        out.fill(runs[i], at, at + runs[i + 1]);
        at += runs[i + 1];
      }
    } else {
      for (let i = 0; i < count; i++) out[i] = (DIGITS.indexOf(text[Math.floor(i / 3)]) >> (2 * (i % 3))) & 3;
    }
    return out;
  }

  /** A scene as the player works with it. `held[step][rank * 5 + lane]` is a span number, `bands` the heads. */
  function read(data) {
    const { ulysses: U, ring: R, at } = data.mesh,
      P = at.length,
      m = { data, U, R, P, at };
    m.position = at.map(([ring, u]) => ring * U + u);
    m.rankAt = [];
    m.position.forEach((p, rank) => {
      m.rankAt[p] = rank;
    });
    const flat = data.chips,
      n = flat.length / 5;
    m.chips = Array.from({ length: n }, (_, i) => ({
      start: flat[5 * i],
      count: flat[5 * i + 1],
      step: flat[5 * i + 2],
      origin: flat[5 * i + 3],
      doc: flat[5 * i + 4],
    }));
    m.spans = data.spans;
    m.inSpan = new Map();
    m.size = data.order.reduce((a, b) => a + b, 0);
    m.steps = data.steps.map((s) => ({
      ...s,
      events: s.events.map((g) => {
        const src = column(g.src);
        return {
          ...g,
          src,
          dst: g.dst ? column(g.dst) : src,
          rows: column(g.rows),
          heads: column(g.heads),
          keys: g.keys && column(g.keys),
          pairs: g.pairs && column(g.pairs),
          shape: g.shape && column(g.shape),
          share: g.share && column(g.share),
          odd: g.odd || [],
        };
      }),
    }));
    m.held = [];
    m.bands = [];
    m.pairs = [];
    m.raised = [];
    let held = new Int32Array(5 * P),
      bands = new Int32Array(5 * P),
      pairs = new Float64Array(P),
      raised = false;
    for (const step of m.steps) {
      held = held.slice();
      bands = bands.slice();
      pairs = pairs.slice();
      const change = step.state,
        rank = column(change.rank),
        lane = column(change.lane);
      const rows = column(change.rows),
        heads = column(change.heads);
      rank.forEach((r, i) => {
        held[5 * r + lane[i]] = rows[i];
        bands[5 * r + lane[i]] = heads[i];
      });
      for (const g of step.events)
        if (g.op === 'attend')
          g.src.forEach((r, i) => {
            pairs[r] += g.pairs[i];
          });
      raised = step.events.some((g) => g.op === 'raise') || (raised && !step.ghost);
      m.held.push(held);
      m.bands.push(bands);
      m.pairs.push(pairs);
      m.raised.push(raised);
    }
    m.ended = (step) => m.steps[step].events.some((e) => e.op === 'output');
    slots(m);
    ledger(m);
    weights(m);
    m.twice = repeats(m);
    return m;
  }

  function rowCount(runs) {
    let n = 0;
    for (let i = 1; i < runs.length; i += 3) n += runs[i];
    return n;
  }

  /** Chips that hold a row of a span, by number. */
  function chipsOf(m, span) {
    if (!m.inSpan.has(span)) {
      const runs = m.spans[span],
        out = [];
      m.chips.forEach((chip, c) => {
        if (meets(runs, chip)) out.push(c);
      });
      m.inSpan.set(span, Int32Array.from(out));
    }
    return m.inSpan.get(span);
  }

  function meets(runs, chip) {
    const last = chip.start + (chip.count - 1) * chip.step;
    for (let i = 0; i < runs.length; i += 3) {
      const a = runs[i],
        n = runs[i + 1],
        d = runs[i + 2],
        b = a + (n - 1) * d;
      if (b < chip.start || a > last) continue;
      if (d === 1 && chip.step === 1) return true;
      const [x, count, dx, y, lastY, dy] =
        chip.count < n ? [chip.start, chip.count, chip.step, a, b, d] : [a, n, d, chip.start, last, chip.step];
      for (let k = 0; k < count; k++) {
        const row = x + k * dx;
        if (row >= y && row <= lastY && (row - y) % dy === 0) return true;
      }
    }
    return false;
  }

  /** A place in a lane for every chip: rows of one ring position share a lane, copies stand at its ends. */
  function slots(m) {
    const group = (c) => (c.origin < 0 ? -1 : Math.floor(c.origin / m.U));
    m.wide = m.held.some((held, s) =>
      [Q, KV].some((lane) => {
        const seen = new Set();
        for (const c of chipsOf(m, held[lane])) if (m.chips[c].origin >= 0) seen.add(group(m.chips[c]));
        return seen.size > 1 && s >= 0;
      }),
    );
    const first = m.chips.findIndex((c) => c.origin >= 0),
      fill = new Map();
    m.before = first < 0 ? m.chips.length : first;
    let longest = 0;
    for (const c of m.chips) {
      if (c.origin < 0) continue;
      const key = m.wide ? 0 : group(c);
      c.slot = fill.get(key) || 0;
      fill.set(key, c.slot + 1);
      longest = Math.max(longest, c.slot + 1);
    }
    let after = 0;
    m.chips.forEach((c, i) => {
      if (c.origin >= 0) {
        c.slot += m.before;
        c.gap = (m.before ? 1 : 0) + (m.wide ? c.origin : c.origin % m.U);
      } else if (i < m.before) {
        c.slot = i;
        c.gap = 0;
      } else {
        c.slot = m.before + longest + after++;
        c.gap = (m.before ? 1 : 0) + (m.wide ? m.P : m.U);
      }
    });
    m.slots = m.before + longest + after;
    m.gaps = (m.before ? 1 : 0) + (m.wide ? m.P - 1 : m.U - 1) + (after ? 1 : 0);
  }

  /** The S x S picture: what is allowed, and which cells each step fills. */
  function ledger(m) {
    const borders = column(m.data.ledger.borders),
      n = borders.length - 1;
    m.borders = borders;
    m.bins = n;
    m.allowed = m.data.ledger.cells.map((row) => cells(row, n));
    m.headParts = [...new Set(m.steps.flatMap((s) => s.events.flatMap((g) => (g.op === 'attend' ? g.heads : []))))];
    m.exact = n === m.size;
    m.binsOf = new Map();
    m.fills = [];
    m.allowedCells = 0;
    for (const row of m.allowed) for (const v of row) if (v) m.allowedCells++;
    m.hasMask = m.allowedCells < n * n;
    m.partly = m.allowed.some((row) => row.includes(1));
  }

  /** Pairs of S rows that a step computes although an earlier one had: `twice(step, query, key, part of the heads)`. */
  function repeats(m) {
    const parts = m.headParts.length,
      cells = m.bins * m.bins * parts,
      seen = new Uint8Array(m.exact && cells <= 4e6 ? cells : 0),
      found = new Set();
    const start = m.data.order[0] + m.data.order[1],
      stop = start + m.data.order[2];
    if (seen.length)
      m.steps.forEach((_, s) => {
        for (const f of fillsOf(m, s)) {
          const ks = binsOf(m, f.keys);
          binsOf(m, f.rows).forEach((q, i) => {
            if (q < start || q >= stop) return; // every ring position has its own copy of a replicated query
            for (let j = 0; j < ks.length; j++) {
              if (!computes(m, f, q, ks[j], i, j)) continue;
              if (!m.allowed[q][ks[j]]) m.forbidden = true;
              const at = (q * m.bins + ks[j]) * parts + f.part;
              if (seen[at]) found.add(s * cells + at);
              seen[at] = 1;
            }
          });
        }
      });
    m.repeated = found.size;
    return (s, q, k, part) => found.size > 0 && found.has(s * cells + (q * m.bins + k) * parts + part);
  }

  function binsOf(m, span) {
    if (!m.binsOf.has(span)) {
      const seen = new Set(),
        runs = m.spans[span],
        bin = (row) => (m.exact ? row : Math.min(m.bins - 1, lower(m.borders, row)));
      for (let i = 0; i < runs.length; i += 3)
        for (let k = 0; k < runs[i + 1]; k++) seen.add(bin(runs[i] + k * runs[i + 2]));
      m.binsOf.set(span, Int32Array.from([...seen].sort((a, b) => a - b)));
    }
    return m.binsOf.get(span);
  }

  function lower(borders, row) {
    let a = 0,
      b = borders.length - 1;
    while (b - a > 1) {
      const c = (a + b) >> 1;
      if (borders[c] <= row) a = c;
      else b = c;
    }
    return a;
  }

  /** Cells that a step computes: [rank, query bins, key bins, shape, pairs] of each attend. */
  function fillsOf(m, number) {
    if (!m.fills[number]) {
      m.fills[number] = [];
      for (const g of m.steps[number].events) {
        if (g.op !== 'attend') continue;
        g.src.forEach((rank, i) =>
          m.fills[number].push({
            rank,
            rows: g.rows[i],
            keys: g.keys[i],
            heads: g.heads[i],
            part: m.headParts.indexOf(g.heads[i]),
            shape: g.shape ? g.shape[i] : 0,
            pairs: g.pairs[i],
          }),
        );
      }
    }
    return m.fills[number];
  }

  function computes(m, fill, q, k, qi, ki) {
    if (fill.shape === 1 || fill.shape === 3) return true;
    if (fill.shape === 2) return ki <= qi;
    return m.allowed[q][k] > 0;
  }

  /** Per rank and step: what share of its softmax each hop has, and what is waiting to be merged. */
  function weights(m) {
    m.accumulators = [];
    let now = Array.from({ length: m.P }, () => ({ merged: [], pending: null }));
    for (const step of m.steps) {
      now = now.map((w) => ({ merged: w.merged, pending: w.pending }));
      for (const g of step.events) {
        if (g.op === 'attend')
          g.src.forEach((rank, i) => {
            const part = { hop: step.stage.replace('hop ', ''), weight: g.share ? g.share[i] : g.pairs[i] },
              w = now[rank];
            if (w.merged.length) w.pending = part;
            else w.merged = [part];
          });
        if (g.op === 'merge')
          g.src.forEach((rank) => {
            const w = now[rank];
            if (w.pending) {
              w.merged = [...w.merged, w.pending];
              w.pending = null;
            }
          });
        if (g.op === 'output') now = now.map(() => ({ merged: [], pending: null }));
      }
      m.accumulators.push(now);
    }
    m.totals = column(m.data.ledger.pairs);
    m.measured = m.steps.some((s) => s.events.some((g) => g.share));
  }

  // -- what to draw when ------------------------------------------------------------------------

  const first = (heads) => Math.floor(heads / HEADS_BASE),
    last = (heads) => heads % HEADS_BASE;
  /** What colours stand for: ranks while there are colours enough, else ring positions. */
  const byRing = (m) => m.P > COLOURS && m.R > 1;
  const hue = (m, position) => (byRing(m) ? Math.floor(position / m.U) : position) % COLOURS;
  const isCopy = (chip) => chip.origin < 0;

  /** What moves while step `number` comes about: flights between lanes, and lanes to leave to them. */
  function flights(m, number) {
    const out = { list: [], moving: new Set(), slide: false };
    if (number < 1) return out;
    const step = m.steps[number],
      was = m.held[number - 1],
      now = m.held[number];
    let crossing = 0;
    for (const g of step.events)
      if (g.op === 'all_to_all' || g.op === 'send')
        g.src.forEach((s, i) => {
          if (s !== g.dst[i]) crossing += chipsOf(m, g.rows[i]).length;
        });
    const every = Math.max(1, Math.ceil(crossing / 4096));
    out.every = every;
    for (let rank = 0; rank < m.P; rank++) {
      if (
        was[5 * rank + NEXT] &&
        was[5 * rank + NEXT] === now[5 * rank + KV] &&
        step.stage !== m.steps[number - 1].stage
      )
        out.slide = true;
    }
    let count = 0;
    for (const g of step.events) {
      if (g.op !== 'all_to_all' && g.op !== 'send') continue;
      const from = g.op === 'send' ? KV : g.tensor === 'Q' ? Q : g.tensor === 'KV' ? KV : OUT;
      const to = g.op === 'send' ? NEXT : from,
        all = g.tensor === 'KV' ? m.data.kv_heads : m.data.heads;
      g.src.forEach((src, i) => {
        const dst = g.dst[i],
          a = first(g.heads[i]) / all,
          b = last(g.heads[i]) / all;
        for (const c of chipsOf(m, g.rows[i])) {
          if (g.op === 'all_to_all' && isCopy(m.chips[c]) && g.tensor !== 'O') continue;
          if (src === dst || count++ % every === 0)
            out.list.push({ c, src, dst, from, to, a, b, send: g.op === 'send' });
        }
      });
      if (g.op === 'all_to_all') out.moving.add(from);
    }
    return out;
  }

  // -- where things are -------------------------------------------------------------------------

  function place(m, w, h, em) {
    const g = { w, h, em, cards: [], small: w < 46 * em };
    const gap = Math.max(6, Math.min(1.1 * em, 0.02 * w)),
      foot = 1.9 * em,
      top = 1.7 * em;
    let side;
    if (g.small) {
      side = Math.min(w - 2.2 * em, 0.42 * h);
      g.mesh = { x: 0, y: 0, w, h: h - side - top - foot - 1.2 * em };
      g.led = { x: 1.6 * em, y: h - side - foot, side };
    } else {
      side = Math.min(h - top - foot - 1.2 * em, 0.36 * w);
      g.mesh = { x: 0, y: 0, w: w - side - 1.6 * em - 2 * gap - 0.6 * em, h };
      g.led = { x: w - side - 1, y: top + 1.2 * em, side };
    }
    const best = fold(m, g.mesh, em, g.small),
      { blocks, lines, cols, rows } = best;
    g.plain = blocks === 1 && lines === 1;
    g.named = g.plain && g.mesh.w / cols > 5.4 * em;
    g.head = g.named ? top : 0.2 * em;
    g.left = g.plain && m.R > 1 && g.mesh.h / rows > 2 * em ? 1.6 * em : 0;
    const gx = best.gx,
      gy = best.gy;
    const cw = (g.mesh.w - g.left - gx * (cols - 1)) / cols,
      ch = (g.mesh.h - g.head - gy * (rows - 1)) / rows;
    g.gx = gx;
    g.gy = gy;
    g.cw = cw;
    g.ch = Math.min(ch, 25 * em);
    const perBlock = Math.ceil(m.R / blocks),
      perLine = Math.ceil(m.U / lines);
    lanes(m, g);
    g.ch = Math.min(g.ch, g.need); // no taller than what it holds
    const usedH = g.ch * rows + gy * (rows - 1);
    g.top = g.mesh.y + g.head;
    for (let rank = 0; rank < m.P; rank++) {
      const [ring, u] = m.at[rank],
        block = Math.floor(ring / perBlock),
        line = Math.floor(u / perLine);
      const col = block * perLine + (u % perLine),
        row = (ring % perBlock) * lines + line;
      g.cards.push({ rank, x: g.mesh.x + g.left + col * (cw + gx), y: g.top + row * (g.ch + gy), w: cw, h: g.ch });
    }
    if (g.small) g.led.y = Math.min(g.led.y, g.top + usedH + top + 1.6 * em);
    return g;
  }

  /** How to fold the R x U mesh so that cards come out legible; unfolded when that is nearly as good. */
  function fold(m, area, em, small) {
    let best = null;
    for (let blocks = 1; blocks <= m.R; blocks++) {
      for (let lines = 1; lines <= m.U; lines++) {
        if ((blocks > 1 && m.R % blocks) || (lines > 1 && m.U % lines)) continue;
        const cols = (m.U / lines) * blocks,
          rows = (m.R / blocks) * lines;
        const roomy = area.w / cols > 11 * em && area.h / rows > 6 * em;
        const gx = roomy ? 2 * em : 0.5 * em,
          gy = roomy ? 1.5 * em : 0.5 * em;
        const cw = (area.w - gx * (cols - 1)) / cols,
          ch = (area.h - gy * (rows - 1)) / rows;
        if (cw < 8 || ch < 8) continue;
        const cell = Math.min(cw / (m.slots + 4), 1.1 * em),
          lane = Math.min(ch / 7, 1.4 * em);
        const score =
          Math.min(cell, 1.6 * lane) *
          Math.sqrt(Math.min(cell, lane) * lane) *
          (blocks === 1 && lines === 1 ? 2.2 : lines === 1 ? 1.3 : 1 / lines) *
          Math.min(1, lane / 7) *
          Math.min(1, cell / 3);
        if (!best || score > best.score) best = { blocks, lines, cols, rows, gx, gy, score, roomy };
      }
    }
    return best || { blocks: 1, lines: 1, cols: m.U, rows: m.R, gx: 2, gy: 2, roomy: false };
  }

  function lanes(m, g) {
    const { em, cw, ch } = g;
    g.level = cw > 15 * em && ch > 8.2 * em ? 2 : cw > 5.5 * em && ch > 4.2 * em ? 1 : 0;
    g.font = g.level === 2 ? 0.86 * em : g.level === 1 ? 0.74 * em : Math.max(8, 0.6 * em);
    const pad = g.level === 2 ? 0.8 * em : g.level === 1 ? 0.45 * em : 0.2 * em;
    const title = g.level === 2 ? 2 * em : g.level === 1 ? 1.45 * em : ch > 3 * em ? 0.85 * em : 0;
    const label = g.level === 2 ? 3.1 * em : 0,
      ring = m.R > 1 && !m.wide;
    g.rows = ring ? [Q, KV, NEXT, OUT] : [Q, KV, OUT];
    const bar = ring ? 1 : 0,
      space = ch - title - 2 * pad + (title ? pad : 0);
    const unit = space / (g.rows.length + 0.62 * bar + 0.28 * (g.rows.length + bar - 1));
    const lane = Math.min(unit, 2.9 * em),
      skip = Math.min(0.28 * unit * (unit / lane), 1.5 * em);
    const text = g.level === 2 && (cw - 2 * pad - label - 6.4 * em) / (m.slots + 2) > 0.42 * em ? 6.4 * em : 0;
    const width = cw - 2 * pad - label - text;
    let lines = 1;
    while (width / Math.ceil(m.slots / lines) < 4 && lane / (lines + 1) > 4) lines++;
    const per = Math.ceil(m.slots / lines),
      wanted = m.gaps ? Math.min(0.5 * em, (0.12 * width) / m.gaps) : 0;
    const between = lines === 1 ? wanted : 0,
      pitch = Math.min(2.2 * em, (width - between * m.gaps) / per);
    const cellGap = pitch > 9 ? 2 : pitch > 4.5 ? 1 : pitch > 2.4 ? 0.5 : 0;
    Object.assign(g, {
      pad,
      title,
      label,
      text,
      lane,
      skip,
      lines,
      per,
      between,
      pitch,
      cell: pitch - cellGap,
      laneX: pad + label,
    });
    g.laneY = {};
    let y = title ? title : pad;
    for (const name of g.rows) {
      g.laneY[name] = y;
      y += lane + skip;
    }
    g.barY = bar ? y : null;
    g.barH = Math.max(3, 0.62 * lane);
    g.need = (bar ? y + g.barH : y - skip) + Math.max(pad, title ? 0.7 * em : 0);
  }

  const slotX = (g, chip) => g.laneX + (chip.slot % g.per) * g.pitch + (g.lines === 1 ? chip.gap * g.between : 0);
  const slotY = (g, chip) => Math.floor(chip.slot / g.per) * (g.lane / g.lines);
  const lineH = (g) => g.lane / g.lines - (g.lines > 1 ? 1 : 0);

  // -- painting ---------------------------------------------------------------------------------

  const ease = (t) => (t < 0.5 ? 4 * t * t * t : 1 - Math.pow(-2 * t + 2, 3) / 2);
  const clamp = (t) => Math.max(0, Math.min(1, t));

  function rounded(cx, x, y, w, h, r) {
    cx.beginPath();
    if (cx.roundRect) cx.roundRect(x, y, w, h, r);
    else cx.rect(x, y, w, h);
  }

  function hatch(theme, scale) {
    const tile = document.createElement('canvas'),
      n = Math.round(7 * scale);
    tile.width = tile.height = n;
    const cx = tile.getContext('2d');
    cx.strokeStyle = theme.edge;
    cx.lineWidth = Math.max(1, scale * 0.9);
    cx.globalAlpha = 0.75;
    cx.beginPath();
    for (const d of [-n, 0, n]) {
      cx.moveTo(d, n);
      cx.lineTo(d + n, 0);
    }
    cx.stroke();
    return tile;
  }

  function Painter(m, g, theme, colourOf, scale) {
    const family = theme.font,
      font = (px, weight) => `${weight || 400} ${px}px ${family}`;
    const caches = { cum: null, cumAt: -1 };

    function fit(cx, text, width) {
      if (cx.measureText(text).width <= width) return text;
      let a = 0,
        b = text.length;
      while (b - a > 1) {
        const c = (a + b) >> 1;
        if (cx.measureText(text.slice(0, c) + '…').width <= width) a = c;
        else b = c;
      }
      return a ? text.slice(0, a) + '…' : '';
    }

    /** The ground: groups, cards, empty slots, names. */
    function ground(cx, step) {
      const { em } = g,
        ghost = m.steps[step].ghost,
        raised = m.raised[step];
      cx.textBaseline = 'middle';
      cx.lineJoin = 'round';
      if (g.named || g.left) {
        cx.font = font(0.86 * em, 600);
        cx.fillStyle = theme.muted;
        cx.textAlign = 'left';
        if (g.named)
          for (let u = 0; u < m.U; u++) {
            const c = g.cards[m.rankAt[u]];
            cx.textAlign = 'center';
            cx.fillText(`Ulysses ${u}`, c.x + c.w / 2, g.mesh.y + 0.7 * em);
          }
        if (g.left)
          for (let r = 0; r < m.R; r++) {
            const c = g.cards[m.rankAt[r * m.U]];
            cx.save();
            cx.translate(g.mesh.x + 0.6 * em, c.y + c.h / 2);
            cx.rotate(-Math.PI / 2);
            cx.textAlign = 'center';
            cx.fillText(c.h > 3.4 * em ? `Ring ${r}` : `R${r}`, 0, 0);
            cx.restore();
          }
      }
      for (const card of g.cards) {
        const { x, y, w, h, rank } = card,
          [ring, u] = m.at[rank];
        rounded(cx, x + 0.5, y + 0.5, w - 1, h - 1, g.level ? 9 : 4);
        cx.fillStyle = theme.panel;
        cx.fill();
        cx.lineWidth = 1;
        cx.strokeStyle = raised ? theme.bad : theme.edge;
        if (raised) cx.lineWidth = 2;
        cx.setLineDash(ghost ? [5, 4] : []);
        cx.stroke();
        cx.setLineDash([]);
        title(cx, card, ring, u, step, raised);
        cx.fillStyle = theme.slot;
        for (const lane of g.rows) laneSlots(cx, card, lane);
        if (g.label) {
          cx.font = font(0.86 * em);
          cx.textAlign = 'left';
          cx.fillStyle = theme.muted;
          for (const lane of g.rows)
            cx.fillText(
              { [Q]: 'Q', [KV]: 'K V', [NEXT]: 'next', [OUT]: 'out' }[lane],
              x + g.pad,
              y + g.laneY[lane] + g.lane / 2 + 0.5,
            );
          if (g.barY !== null) cx.fillText('LSE', x + g.pad, y + g.barY + g.barH / 2 + 0.5);
        }
        if (g.barY !== null) {
          cx.fillStyle = theme.slot;
          rounded(cx, x + g.laneX, y + g.barY, barW(), g.barH, g.barH / 2.4);
          cx.fill();
        }
      }
    }

    const barW = () => g.cw - g.laneX - g.pad - g.text;

    function title(cx, card, ring, u, step, raised) {
      if (!g.title) return;
      const { em } = g,
        mid = card.y + g.title / 2 + (g.level === 2 ? 0.06 * em : 0),
        left = card.x + g.pad,
        p = m.position[card.rank];
      const box = g.level === 2 ? 0.72 * em : g.level === 1 ? 0.6 * em : Math.max(5, 0.42 * em);
      cx.fillStyle = theme.colours[hue(m, p)];
      rounded(cx, left, mid - box / 2, box, box, 2.5);
      cx.fill();
      cx.textAlign = 'left';
      cx.fillStyle = theme.ink;
      cx.font = font(g.level === 2 ? em : g.font, 650);
      const name = g.level ? `rank ${card.rank}` : String(card.rank),
        at = left + box + 0.4 * em * (g.level ? 1 : 0.5);
      cx.fillText(name, at, mid);
      const used = at + cx.measureText(name).width - card.x;
      if (!g.level) return;
      cx.font = font(g.font);
      cx.textAlign = 'right';
      const right = card.x + card.w - g.pad,
        room = card.w - used - g.pad - 0.8 * em;
      if (raised) {
        cx.fillStyle = theme.bad;
        cx.font = font(g.font, 650);
        cx.fillText(fit(cx, '⊘ raised', room), right, mid);
        return;
      }
      cx.fillStyle = theme.muted;
      const heads = m.bands[step][5 * card.rank + Q] || m.bands[step][5 * card.rank + OUTPUT],
        held = m.held[step][5 * card.rank + Q] || m.held[step][5 * card.rank + OUTPUT];
      const a = first(heads),
        b = last(heads),
        say = !held ? '' : b - a === m.data.heads ? 'all heads' : b - a === 1 ? `head ${a}` : `heads ${a}–${b - 1}`;
      const where = g.named && g.left ? '' : g.named && m.R === 1 ? '' : `ring ${ring} · Ulysses ${u}`;
      const options = [[where, say].filter(Boolean).join(' · '), say, ''];
      cx.fillText(
        options.find((text) => cx.measureText(text).width <= room),
        right,
        mid,
      );
    }

    function laneSlots(cx, card, lane) {
      const h = lineH(g);
      if (g.pitch > 3.2 && g.lines === 1) {
        for (let s = 0; s < m.slots; s++) {
          const gap = slotGap(s);
          cx.fillRect(card.x + g.laneX + s * g.pitch + gap * g.between, card.y + g.laneY[lane], g.cell, h);
        }
      } else
        for (let l = 0; l < g.lines; l++)
          cx.fillRect(
            card.x + g.laneX,
            card.y + g.laneY[lane] + l * (g.lane / g.lines),
            Math.min(g.per, m.slots) * g.pitch + m.gaps * g.between,
            h,
          );
    }

    // The gap before a slot differs from group to group with uneven shards: the card's own group decides.
    const gapBySlot = [];
    for (const c of m.chips) if (gapBySlot[c.slot] === undefined) gapBySlot[c.slot] = c.gap;
    const slotGap = (s) => (gapBySlot[s] === undefined ? 0 : gapBySlot[s]);

    /** Chips of one lane; `a`, `b` bound the band of heads. Rectangles are gathered by colour. */
    function gather(bag, card, lane, chips, a, b, from, share) {
      const h = lineH(g),
        y0 = card.y + g.laneY[lane];
      for (const c of chips) {
        const chip = m.chips[c],
          colour = colourOf(chip),
          list = bag[colour] || (bag[colour] = []);
        const top = y0 + slotY(g, chip),
          x = card.x + slotX(g, chip);
        let y = top + a * h,
          height = Math.max(1.5, (b - a) * h);
        if (m.U > 1 && b - a < 1 && height > 5) {
          y += a > 0 ? 0.5 : 0;
          height -= 0.5;
        }
        if (share !== undefined) {
          const part = height * share;
          list.push(x, y + height - part, g.cell, part);
        } else list.push(x, y, g.cell, height);
      }
    }

    function flush(cx, bag, alpha) {
      cx.globalAlpha = alpha;
      for (const colour in bag) {
        const list = bag[colour];
        cx.fillStyle = theme.colours[colour] || theme.edge;
        for (let i = 0; i < list.length; i += 4) cx.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
      }
      cx.globalAlpha = 1;
    }

    const band = (state, rank, lane, all) => [first(state[5 * rank + lane]) / all, last(state[5 * rank + lane]) / all];

    /** What rests in the lanes of a step. `slide`: K/V is moving up ('out'), or has done so ('in', as in the next step). */
    function rest(cx, step, moving, slide) {
      const H = m.data.heads,
        G = m.data.kv_heads,
        bag = {},
        done = {};
      const alpha = m.steps[step].ghost ? 0.55 : 1;
      for (const card of g.cards) {
        const r = card.rank;
        for (const lane of [Q, KV, NEXT]) {
          if (slide && (lane === NEXT || (lane === KV && slide === 'out'))) continue;
          const held = m.held[slide && lane === KV ? step + 1 : step],
            bands = m.bands[slide && lane === KV ? step + 1 : step];
          if (g.laneY[lane] === undefined || !held[5 * r + lane]) continue;
          let chips = chipsOf(m, held[5 * r + lane]);
          if (moving.has(lane)) chips = chips.filter((c) => isCopy(m.chips[c]));
          gather(bag, card, lane, chips, ...band(bands, r, lane, lane === Q ? H : G));
        }
        if (m.held[step][5 * r + OUTPUT] && !moving.has(OUT))
          gather(done, card, OUT, chipsOf(m, m.held[step][5 * r + OUTPUT]), ...band(m.bands[step], r, OUTPUT, H));
      }
      flush(cx, bag, alpha);
      flush(cx, done, alpha);
      texts(cx, step, moving, slide);
    }

    /** Exact rows beside the lanes, where there is room. */
    function texts(cx, step, moving, slide) {
      if (!g.text) return;
      const held = m.held[step];
      cx.font = font(0.79 * g.em);
      cx.textAlign = 'left';
      cx.textBaseline = 'middle';
      for (const card of g.cards)
        for (const lane of g.rows) {
          const span =
            lane === OUT ? held[5 * card.rank + OUTPUT] || held[5 * card.rank + PARTIAL] : held[5 * card.rank + lane];
          if (!span || moving.has(lane) || (slide && (lane === KV || lane === NEXT))) continue;
          cx.fillStyle = theme.muted;
          const text = spanText(m.spans[span], 2),
            x = card.x + card.w - g.pad - g.text + 0.9 * g.em;
          cx.fillText(fit(cx, text, g.text - 0.7 * g.em), x, card.y + g.laneY[lane] + g.lane / 2 + 0.5);
        }
    }

    /** Partial outputs: a pale band (`ground`), filled as far as the rank has met its keys. */
    function partials(cx, step, t, under) {
      const held = m.held[step],
        was = step ? m.held[step - 1] : held,
        pale = {},
        fill = {},
        H = m.data.heads;
      const ghost = m.steps[step].ghost ? 0.55 : 1,
        rotating = t < 1 && step && !held[PARTIAL] ? step - 1 : step;
      for (const card of g.cards) {
        const r = card.rank,
          span = held[5 * r + PARTIAL] || (t < 1 ? was[5 * r + PARTIAL] : 0);
        if (!span || held[5 * r + OUTPUT]) continue;
        const heads = m.bands[held[5 * r + PARTIAL] ? step : rotating],
          a = first(heads[5 * r + PARTIAL]) / H,
          b = last(heads[5 * r + PARTIAL]) / H;
        const now = m.pairs[step][r],
          before = step ? m.pairs[step - 1][r] : 0,
          share = m.totals[r] ? (before + (now - before) * t) / m.totals[r] : 0;
        const chips = chipsOf(m, span);
        if (under) gather(pale, card, OUT, chips, a, b);
        if (t > 0 && under !== 'only') gather(fill, card, OUT, chips, a, b, 0, Math.min(1, share));
      }
      flush(cx, pale, 0.25 * ghost);
      flush(cx, fill, 0.8 * ghost);
    }

    /** The accumulator's parts by weight; a merge brings the waiting part in and rescales the rest. */
    function bars(cx, step, t) {
      if (g.barY === null) return;
      const W = barW(),
        now = m.accumulators[step],
        was = step ? m.accumulators[step - 1] : now.map(() => ({ merged: [], pending: null }));
      cx.textBaseline = 'middle';
      cx.textAlign = 'left';
      for (const card of g.cards) {
        const a = layoutBar(was[card.rank], W),
          b = layoutBar(now[card.rank], W),
          n = Math.max(a.length, b.length);
        const y = card.y + g.barY,
          x0 = card.x + g.laneX;
        for (let i = 0; i < n; i++) {
          const from = a[i] || {
              x: b[i].x + (b[i].pending ? b[i].w : 0),
              w: 0,
              pending: b[i].pending,
              share: 0,
              hop: b[i].hop,
            },
            to = b[i] || { ...from, w: from.w, gone: true };
          const x = x0 + from.x + (to.x - from.x) * t,
            w = from.w + (to.w - from.w) * t;
          if (w < 0.5) continue;
          cx.globalAlpha = (to.gone ? 1 - t : 1) * (m.steps[step].ghost ? 0.6 : 1);
          rounded(cx, x, y, Math.max(1, w - 1), g.barH, Math.min(3, w / 2));
          cx.fillStyle = theme.accent;
          const shade = cx.globalAlpha * (i % 2 ? 0.45 : 0.85);
          cx.globalAlpha = shade;
          if (!to.pending) cx.fill();
          cx.globalAlpha = shade > 0.3 ? 1 : shade;
          if (to.pending) {
            cx.strokeStyle = theme.accent;
            cx.lineWidth = 1.5;
            cx.setLineDash([3, 2]);
            cx.stroke();
            cx.setLineDash([]);
          }
          cx.globalAlpha = 1;
        }
      }
      if (g.text && t === 1) {
        cx.font = font(0.79 * g.em);
        cx.fillStyle = theme.muted;
        for (const card of g.cards) {
          const w = now[card.rank],
            total = w.merged.reduce((s, p) => s + p.weight, 0);
          if (!w.merged.length) continue;
          const text = w.pending
            ? `+ hop ${w.pending.hop}`
            : w.merged.length < 3
              ? w.merged.map((p) => Math.round((100 * p.weight) / total) + '%').join(' + ')
              : `${w.merged.length} hops`;
          cx.fillText(
            fit(cx, text, g.text - 0.7 * g.em),
            card.x + card.w - g.pad - g.text + 0.9 * g.em,
            card.y + g.barY + g.barH / 2 + 0.5,
          );
        }
      }
    }

    function layoutBar(w, W) {
      const total = w.merged.reduce((s, p) => s + p.weight, 0) || 1,
        full = w.pending ? 0.64 * W : W;
      let x = 0;
      const out = w.merged.map((p) => {
        const width = (full * p.weight) / total,
          part = { x, w: width, hop: p.hop };
        x += width;
        return part;
      });
      if (w.pending) out.push({ x: 0.68 * W, w: 0.32 * W, pending: true, hop: w.pending.hop });
      return out;
    }

    /** Arrows in the gaps between cards; those of this step's traffic stand out. */
    function arrows(cx, step, active) {
      if (g.gx < g.em) return;
      const { em } = g,
        ops = new Set(active ? m.steps[step].events.map((e) => e.op) : []);
      const draw = (x, y, dx, dy, on) => {
        cx.strokeStyle = cx.fillStyle = on ? theme.accent : theme.edge;
        cx.lineWidth = on ? 2.2 : 1.2;
        const L = 0.5 * em,
          head = 0.3 * em;
        cx.beginPath();
        cx.moveTo(x - dx * L, y - dy * L);
        cx.lineTo(x + dx * (L - 2), y + dy * (L - 2));
        cx.stroke();
        cx.beginPath();
        cx.moveTo(x + dx * L, y + dy * L);
        cx.lineTo(x + dx * (L - head) - dy * head * 0.6, y + dy * (L - head) + dx * head * 0.6);
        cx.lineTo(x + dx * (L - head) + dy * head * 0.6, y + dy * (L - head) - dx * head * 0.6);
        cx.fill();
      };
      for (let r = 0; r < m.R; r++)
        for (let u = 0; u + 1 < m.U; u++) {
          const c = g.cards[m.rankAt[r * m.U + u]],
            x = c.x + c.w + g.gx / 2,
            y = c.y + c.h / 2,
            on = ops.has('all_to_all');
          if (g.cards[m.rankAt[r * m.U + u + 1]].y !== c.y) continue;
          draw(x, y - 0.3 * em, 1, 0, on);
          draw(x, y + 0.3 * em, -1, 0, on);
        }
      if (g.named && m.U > 1) {
        const c = g.cards[m.rankAt[0]],
          on = ops.has('all_to_all');
        cx.font = font(0.79 * em, on ? 650 : 400);
        cx.textAlign = 'center';
        cx.textBaseline = 'middle';
        cx.fillStyle = on ? theme.accent : theme.muted;
        if (g.cw > 14 * em) cx.fillText('all-to-all', c.x + c.w + g.gx / 2, g.mesh.y + 0.7 * em);
      }
      for (let u = 0; u < m.U; u++)
        for (let r = 0; r + 1 < m.R; r++) {
          const c = g.cards[m.rankAt[r * m.U + u]],
            x = c.x + c.w / 2,
            y = c.y + c.h + g.gy / 2,
            on = ops.has('send');
          if (g.cards[m.rankAt[(r + 1) * m.U + u]].x !== c.x) continue;
          draw(x - 0.5 * em, y, 0, 1, on);
          cx.font = font(0.79 * em, on ? 650 : 400);
          cx.textAlign = 'left';
          cx.textBaseline = 'middle';
          cx.fillStyle = on ? theme.accent : theme.muted;
          cx.fillText(r === 0 && c.w > 17 * em ? 'K V, round the ring' : 'K V', x, y);
        }
    }

    /** Things in flight at time t of a step. */
    function fly(cx, step, move, t) {
      const H = lineH(g),
        bag = {},
        alpha = m.steps[step].ghost ? 0.6 : 1,
        cut = move.slide ? 0.26 : 0;
      if (move.slide && t < cut) {
        const s = ease(clamp(t / cut)),
          old = {},
          fresh = {},
          G = m.data.kv_heads,
          held = m.held[step],
          was = m.held[step - 1];
        for (const card of g.cards) {
          const r = card.rank;
          if (was[5 * r + KV] && t < cut)
            gather(old, card, KV, chipsOf(m, was[5 * r + KV]), ...band(m.bands[step - 1], r, KV, G));
          if (held[5 * r + KV]) {
            const list = {};
            gather(list, card, KV, chipsOf(m, held[5 * r + KV]), ...band(m.bands[step], r, KV, G));
            const shift = (1 - s) * (g.laneY[NEXT] - g.laneY[KV]);
            for (const colour in list) {
              const to = fresh[colour] || (fresh[colour] = []);
              list[colour].forEach((v, i) => to.push(i % 4 === 1 ? v + shift : v));
            }
          }
        }
        flush(cx, old, 0.8 * (1 - s));
        flush(cx, fresh, alpha);
      }
      if (move.list.length) {
        const u = (t - cut) / (1 - cut);
        if (u < 0) return;
        for (const f of move.list) {
          const chip = m.chips[f.c],
            A = g.cards[f.src],
            B = g.cards[f.dst],
            dx = slotX(g, chip),
            dy = slotY(g, chip) + f.a * H;
          const late = 0.3 * (chip.slot / m.slots),
            s = ease(clamp((u - late) / 0.7));
          const x0 = A.x + dx,
            y0 = A.y + g.laneY[f.from] + dy,
            x1 = B.x + dx,
            y1 = B.y + g.laneY[f.to] + dy;
          const arc = f.src === f.dst ? 0 : Math.sin(Math.PI * s),
            list = bag[colourOf(chip)] || (bag[colourOf(chip)] = []);
          const back = f.send && B.y < A.y ? arc * Math.min(g.cw * 0.25, 3 * g.em) : 0;
          list.push(
            x0 + (x1 - x0) * s + back,
            y0 + (y1 - y0) * s - (f.send ? 0 : arc * 0.4 * g.em),
            g.cell,
            Math.max(1.5, (f.b - f.a) * H - (f.b - f.a < 1 ? 0.5 : 0)),
          );
        }
        flush(cx, bag, alpha);
      }
    }

    // The ledger: one small bitmap for all steps so far, one for the step that comes about.

    const dots = Math.max(1, Math.round(g.led.side * scale));
    function sheet(n) {
      const c = document.createElement('canvas');
      c.width = c.height = n;
      return c;
    }

    /** Diagonal stripes in the colours of the ranks that share a rectangle by heads. */
    function stripes(colours) {
      if (colours.length < 2) return colours[0];
      const width = Math.max(3, Math.round((colours.length > 4 ? 0.3 : 0.5) * g.em * scale)),
        n = width * colours.length,
        c = sheet(n),
        cx = c.getContext('2d');
      colours.forEach((colour, i) => {
        cx.fillStyle = colour;
        for (const shift of [-n, 0, n]) {
          const x = i * width + shift;
          cx.beginPath();
          cx.moveTo(x, 0);
          cx.lineTo(x + width, 0);
          cx.lineTo(x + width + n, n);
          cx.lineTo(x + n, n);
          cx.fill();
        }
      });
      return cx.createPattern(c, 'repeat');
    }

    /** Cells as a small bitmap, blown up, in one fill style. */
    function stamp(target, flags, style, alpha) {
      const small = sheet(m.bins),
        sx = small.getContext('2d'),
        image = sx.createImageData(m.bins, m.bins),
        px = new Uint32Array(image.data.buffer);
      for (let i = 0; i < px.length; i++) if (flags[i]) px[i] = 0xff000000;
      sx.putImageData(image, 0, 0);
      const big = sheet(dots),
        bx = big.getContext('2d');
      bx.imageSmoothingEnabled = false;
      bx.drawImage(small, 0, 0, dots, dots);
      bx.globalCompositeOperation = 'source-in';
      bx.fillStyle = style;
      bx.fillRect(0, 0, dots, dots);
      target.globalAlpha = alpha;
      target.drawImage(big, 0, 0);
      target.globalAlpha = 1;
    }

    function overlay(step) {
      const out = sheet(dots),
        ox = out.getContext('2d'),
        groups = new Map(),
        wrong = new Uint8Array(m.bins * m.bins);
      let bad = false;
      for (const f of fillsOf(m, step)) {
        const key = byRing(m) ? hue(m, m.position[f.rank]) : `${f.rows},${f.keys},${f.shape}`;
        if (!groups.has(key))
          groups.set(key, {
            colours: [],
            flags: new Uint8Array(m.bins * m.bins),
            pale: new Uint8Array(m.bins * m.bins),
            done: new Set(),
          });
        const group = groups.get(key),
          colour = theme.colours[hue(m, m.position[f.rank])];
        if (!group.colours.includes(colour)) group.colours.push(colour);
        const qs = binsOf(m, f.rows),
          ks = binsOf(m, f.keys),
          same = `${f.rows},${f.keys},${f.shape}`;
        if (group.done.has(same) && !m.repeated) continue;
        group.done.add(same);
        for (let i = 0; i < qs.length; i++) {
          const q = qs[i],
            at = q * m.bins,
            allowed = m.allowed[q];
          for (let j = 0; j < ks.length; j++) {
            const k = ks[j];
            if (!computes(m, f, q, k, i, j)) continue;
            if (!allowed[k] || m.twice(step, q, k, f.part)) {
              wrong[at + k] = 1;
              bad = true;
            } else if (allowed[k] === 1 && m.exact) group.pale[at + k] = 1;
            else group.flags[at + k] = 1;
          }
        }
      }
      for (const group of groups.values()) {
        const style = stripes(group.colours);
        stamp(ox, group.flags, style, 1);
        if (m.partly) stamp(ox, group.pale, style, 0.55);
      }
      if (bad) stamp(ox, wrong, theme.bad, 1);
      return out;
    }

    const overlays = new Map();
    function over(step) {
      if (!overlays.has(step)) {
        if (overlays.size > 3) overlays.clear();
        overlays.set(step, overlay(step));
      }
      return overlays.get(step);
    }
    function sum(step) {
      if (!caches.cum || caches.cumAt > step) {
        caches.cum = sheet(dots);
        caches.cumAt = -1;
      }
      const cx = caches.cum.getContext('2d');
      while (caches.cumAt < step) {
        const n = ++caches.cumAt;
        if (fillsOf(m, n).length) cx.drawImage(over(n), 0, 0);
      }
      return caches.cum;
    }

    function ledgerGround(cx, scale) {
      const { x, y, side } = g.led,
        { em } = g,
        cell = side / m.bins;
      cx.textBaseline = 'middle';
      cx.textAlign = 'left';
      cx.fillStyle = theme.ink;
      cx.font = font(0.93 * em, 650);
      cx.fillText('Pairs', x, y - 2.05 * em);
      const used = cx.measureText('Pairs').width;
      cx.font = font(0.86 * em);
      cx.fillStyle = theme.muted;
      cx.fillText(
        fit(cx, byRing(m) ? 'by ring position' : 'by the rank that computes them', side - used - 0.6 * em),
        x + used + 0.6 * em,
        y - 2.05 * em,
      );
      cx.font = font(0.79 * em);
      cx.fillText('keys →', x, y - 0.95 * em);
      cx.save();
      cx.translate(x - 0.95 * em, y);
      cx.rotate(-Math.PI / 2);
      cx.textAlign = 'right';
      cx.fillText('← queries', 0, 0);
      cx.restore();
      cx.fillStyle = theme.slot;
      cx.fillRect(x, y, side, side);
      const mask = document.createElement('canvas');
      mask.width = mask.height = m.bins;
      const mx = mask.getContext('2d'),
        image = mx.createImageData(m.bins, m.bins),
        px = new Uint32Array(image.data.buffer);
      let any = false;
      m.allowed.forEach((row, q) =>
        row.forEach((v, k) => {
          if (!v) {
            px[q * m.bins + k] = 0xff000000;
            any = true;
          }
        }),
      );
      mx.putImageData(image, 0, 0);
      if (any) {
        const layer = document.createElement('canvas');
        layer.width = layer.height = Math.round(side * scale);
        const lx = layer.getContext('2d');
        lx.imageSmoothingEnabled = false;
        lx.drawImage(mask, 0, 0, layer.width, layer.height);
        lx.globalCompositeOperation = 'source-in';
        lx.fillStyle = theme.panel;
        lx.fillRect(0, 0, layer.width, layer.height);
        lx.globalCompositeOperation = 'source-atop';
        lx.fillStyle = lx.createPattern(hatch(theme, scale), 'repeat');
        lx.fillRect(0, 0, layer.width, layer.height);
        cx.drawImage(layer, x, y, side, side);
      }
      strips(cx, cell);
    }

    /** Along both axes, the rank (or document) that each row starts with. */
    function strips(cx, cell) {
      const { x, y, side } = g.led,
        t = Math.max(3, 0.28 * g.em),
        d = t + 2;
      for (const chip of m.chips)
        for (let n = 0; n < chip.count; n += Math.max(1, Math.floor(m.size / 512 / chip.step))) {
          const row = chip.start + n * chip.step,
            a = (row * side) / m.size,
            len = Math.max(
              0.6,
              chip.step === 1 && m.size > 512
                ? (Math.min(chip.count - n, Math.floor(m.size / 512)) * side) / m.size
                : side / m.size,
            );
          cx.fillStyle = theme.colours[colourOf(chip)] || theme.edge;
          cx.fillRect(x + a, y - d, len + 0.2, t);
          cx.fillRect(x - d, y + a, t, len + 0.2);
        }
    }

    /** Once the output is there: what was allowed and never computed. */
    function missing(cx, step) {
      const { x, y, side } = g.led;
      if (!m.steps[step].events.some((e) => e.op === 'output')) return false;
      const flags = missingCells(m, step);
      if (!flags) return false;
      const c = sheet(dots);
      stamp(
        c.getContext('2d'),
        flags,
        c.getContext('2d').createPattern(hatch({ edge: theme.bad }, scale * 1.4), 'repeat'),
        1,
      );
      cx.drawImage(c, x, y, side, side);
      return true;
    }

    function ledgerLines(cx) {
      const { x, y, side } = g.led,
        cell = side / m.bins;
      if (cell > 4.5) {
        cx.strokeStyle = theme.panel;
        cx.lineWidth = cell > 7 ? 1 : 0.6;
        cx.globalAlpha = 0.75;
        cx.beginPath();
        for (let i = 1; i < m.bins; i++) {
          cx.moveTo(x + i * cell, y);
          cx.lineTo(x + i * cell, y + side);
          cx.moveTo(x, y + i * cell);
          cx.lineTo(x + side, y + i * cell);
        }
        cx.stroke();
        cx.globalAlpha = 1;
      }
      const docs = m.data.documents;
      if (docs.length > 1) {
        cx.strokeStyle = theme.ink;
        cx.lineWidth = 1.4;
        let at = m.data.order[0] + m.data.order[1];
        cx.beginPath();
        for (const n of docs) {
          if (n) {
            const a = (at * side) / m.size,
              b = (n * side) / m.size;
            cx.rect(x + a, y + a, b, b);
          }
          at += n;
        }
        cx.stroke();
      }
      cx.strokeStyle = theme.edge;
      cx.lineWidth = 1;
      cx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    }

    /** Names of the ranks in the rectangles of this step, and the count below. */
    function ledgerTexts(cx, step) {
      const { x, y, side } = g.led,
        { em } = g,
        groups = new Map();
      for (const f of fillsOf(m, step)) {
        const key = `${f.rows},${f.keys}`;
        if (!groups.has(key)) groups.set(key, { f, ranks: [] });
        groups.get(key).ranks.push(f.rank);
      }
      cx.font = font(0.79 * em, 650);
      cx.textAlign = 'center';
      cx.textBaseline = 'middle';
      if (groups.size <= 16)
        for (const { f, ranks } of groups.values()) {
          const qs = m.spans[f.rows],
            ks = m.spans[f.keys];
          if (qs.length > 3 || ks.length > 3) continue;
          const w = (ks[1] * side) / m.size,
            h = (qs[1] * side) / m.size,
            text =
              ranks.length > 3
                ? `ranks ${ranks[0]}…${ranks[ranks.length - 1]}`
                : `rank${ranks.length > 1 ? 's' : ''} ${ranks.join(', ')}`;
          const width = cx.measureText(text).width + em;
          if (width > w || h < 1.7 * em) continue;
          const mx = x + ((ks[0] + ks[1] / 2) * side) / m.size,
            my = y + ((qs[0] + qs[1] / 2) * side) / m.size;
          rounded(cx, mx - width / 2, my - 0.75 * em, width, 1.5 * em, 0.75 * em);
          cx.fillStyle = theme.panel;
          cx.fill();
          cx.fillStyle = theme.ink;
          cx.fillText(text, mx, my + 0.5);
        }
      const done = sumOf(m.pairs[step]),
        all = sumOf(m.totals),
        audit = m.data.ledger.audit;
      cx.textAlign = 'left';
      cx.font = font(0.86 * em);
      cx.fillStyle = theme.muted;
      const extra = audit ? ` · ${audit.missing} missing · ${audit.repeated} twice · ${audit.forbidden} forbidden` : '';
      const main =
        done > all ? `${grouped(done)} pairs, ${grouped(all)} allowed` : `${grouped(done)} of ${grouped(all)} pairs`;
      if (m.ended(step) && done !== all) cx.fillStyle = theme.bad;
      const short = m.ended(step) && done < all ? `${main} · ${grouped(all - done)} never` : main;
      const said = fit(cx, extra && cx.measureText(main + extra).width <= side ? main + extra : short, side);
      cx.fillText(said, x, y + side + 1.1 * em);
      cx.fillStyle = theme.muted;
      const flagged = m.repeated ? 'red: computed twice' : m.forbidden ? 'red: forbidden' : '';
      if (m.hasMask || flagged) {
        const text = flagged || 'hatched: masked',
          w = cx.measureText(text).width;
        if (cx.measureText(said).width + w + 1.5 * em <= side) {
          cx.textAlign = 'right';
          cx.fillText(text, x + side, y + side + 1.1 * em);
        }
      }
    }

    function ledgerAt(cx, step, t) {
      const { x, y, side } = g.led;
      cx.imageSmoothingEnabled = false;
      if (t < 1) {
        if (step) cx.drawImage(sum(step - 1), x, y, side, side);
      } else cx.drawImage(sum(step), x, y, side, side);
    }

    function ledgerFill(cx, step, t) {
      if (!fillsOf(m, step).length) return;
      const { x, y, side } = g.led;
      cx.imageSmoothingEnabled = false;
      cx.globalAlpha = clamp(t);
      cx.drawImage(over(step), x, y, side, side);
      cx.globalAlpha = 1;
    }

    /** The cursor: the token wherever it is, and its row and column among the pairs. */
    function cursor(cx, step, token) {
      if (!token) return;
      cx.strokeStyle = theme.ink;
      cx.lineWidth = 2;
      const chip = m.chips[token.chip];
      for (const card of g.cards)
        for (const lane of g.rows) {
          const i = 5 * card.rank + lane,
            span = lane === OUT ? m.held[step][5 * card.rank + OUTPUT] || m.held[step][i] : m.held[step][i];
          if (!span || !chipsOf(m, span).includes(token.chip)) continue;
          rounded(
            cx,
            card.x + slotX(g, chip) - 1.5,
            card.y + g.laneY[lane] + slotY(g, chip) - 1.5,
            g.cell + 3,
            lineH(g) + 3,
            3,
          );
          cx.stroke();
        }
      const { x, y, side } = g.led,
        a = (chip.start * side) / m.size,
        t = Math.max(2, (side / m.size) * (chip.step === 1 ? chip.count : 1));
      cx.strokeRect(x, y + a, side, t);
      cx.setLineDash([4, 3]);
      cx.strokeRect(x + a, y, t, side);
      cx.setLineDash([]);
      if (token.key !== undefined) {
        const k = (token.key * side) / m.bins,
          q = (token.query * side) / m.bins,
          s = side / m.bins;
        cx.lineWidth = 3;
        cx.strokeRect(x + k - 1, y + q - 1, s + 2, s + 2);
      }
    }

    function difference(cx, step) {
      const badge = m.data.badge;
      if (badge.kind !== 'differs' || badge.step !== step) return;
      cx.strokeStyle = theme.bad;
      cx.fillStyle = theme.bad;
      cx.lineWidth = 3;
      cx.font = font(0.86 * g.em, 650);
      cx.textAlign = 'right';
      cx.textBaseline = 'bottom';
      for (const rank of badge.ranks) {
        const c = g.cards[rank];
        if (!c) continue;
        rounded(cx, c.x - 2, c.y - 2, c.w + 4, c.h + 4, 10);
        cx.stroke();
        if (g.level) cx.fillText('first difference', c.x + c.w - g.pad, c.y + c.h - 0.3 * g.em);
      }
    }

    return {
      ground,
      rest,
      partials,
      bars,
      arrows,
      fly,
      ledgerGround,
      ledgerLines,
      ledgerTexts,
      ledgerAt,
      ledgerFill,
      missing,
      cursor,
      difference,
      sum,
    };
  }

  const sumOf = (values) => values.reduce((a, b) => a + b, 0);
  const grouped = (n) =>
    Math.round(n)
      .toString()
      .replace(/\B(?=(\d{3})+$)/g, ',');

  // -- about a token ----------------------------------------------------------------------------

  /** Runs as `[0, 12) [24, 36)`; stripes as `[0, 48) step 4`. */
  function spanText(runs, limit) {
    const parts = [];
    for (let i = 0; i < runs.length; i += 3) {
      const [a, n, d] = runs.slice(i, i + 3);
      parts.push(d === 1 || n === 1 ? `[${a}, ${a + n})` : `[${a}, ${a + (n - 1) * d + 1}) step ${d}`);
    }
    const rest = parts.length - limit;
    return parts.slice(0, limit).join(' ') + (rest > 0 ? ` and ${rest} more` : '') || 'none';
  }

  const headText = (heads) =>
    last(heads) - first(heads) === 1 ? `head ${first(heads)}` : `heads [${first(heads)}, ${last(heads)})`;
  const rankList = (ranks) =>
    ranks.length > 6 ? `${ranks.slice(0, 6).join(', ')} and ${ranks.length - 6} more` : ranks.join(', ');

  function runsOf(flags, m) {
    const out = [];
    for (let i = 0; i < flags.length; i++)
      if (flags[i]) {
        const a = i;
        while (i + 1 < flags.length && flags[i + 1]) i++;
        out.push(`[${m.borders[a]}, ${m.borders[i + 1]})`);
      }
    const rest = out.length - 5;
    return out.slice(0, 5).join(' ') + (rest > 0 ? ` and ${rest} more` : '') || 'nothing';
  }

  /** Sentences about a token at a step: where it is, who sees it, where it has been. */
  function about(m, step, token) {
    const chip = m.chips[token.chip],
      lines = [],
      rows = chip.count === 1 ? `Row ${chip.start}` : `Rows ${spanText([chip.start, chip.count, chip.step], 1)}`;
    const parts = [rows];
    if (chip.origin < 0) parts.push('a copy on every rank');
    else parts.push(`starts on rank ${m.rankAt[chip.origin]}`);
    if (m.data.documents.length > 1 && chip.doc >= 0) parts.push(`document ${chip.doc}`);
    lines.push(parts.join(' · '));
    const at = (lane) => {
      const found = [];
      for (let r = 0; r < m.P; r++) {
        const i = 5 * r + lane,
          span = m.held[step][i];
        if (span && chipsOf(m, span).includes(token.chip)) found.push([r, m.bands[step][i]]);
      }
      if (!found.length) return '';
      if (found.length > 4) return `ranks ${rankList(found.map(([r]) => r))}`;
      return found.map(([r, heads]) => `rank ${r} ${headText(heads)}`).join(', ');
    };
    const q = at(Q),
      done = at(OUTPUT),
      part = at(PARTIAL),
      kv = at(KV),
      next = at(NEXT),
      path = journey(m, step, token.chip);
    const own = [
      q && (part === q ? `Q and partial output on ${q}` : `Q on ${q}`),
      part && part !== q && `partial output on ${part}`,
      done && `output on ${done}`,
    ].filter(Boolean);
    if (own.length) lines.push(own.join('; ') + '.');
    const keys = [
      kv && `K/V on ${kv}`,
      next && `arriving on ${next}`,
      path.length > 1 && `way so far: ${path.join(' → ')}`,
    ].filter(Boolean);
    if (keys.length) lines.push(keys.join('; ') + '.');
    const bin = lower(m.borders, chip.start),
      sees = m.allowed[bin],
      seen = m.allowed.map((row) => row[bin]);
    const met = new Uint8Array(m.bins);
    for (let s = 0; s <= step; s++)
      for (const f of fillsOf(m, s)) {
        const qs = binsOf(m, f.rows),
          i = qs.indexOf(bin);
        if (i < 0) continue;
        binsOf(m, f.keys).forEach((k, j) => {
          if (computes(m, f, bin, k, i, j)) met[k] = 1;
        });
      }
    const about = m.exact ? '' : 'about ';
    lines.push(
      `May see keys ${about}${runsOf(sees, m)}, has met ${about}${runsOf(met, m)}; seen by queries ${about}${runsOf(seen, m)}.`,
    );
    if (token.key !== undefined) lines.splice(1, 0, pairText(m, step, token));
    return lines;
  }

  /** The ranks that held a chip's K/V, one entry each time they changed. */
  function journey(m, step, chip) {
    const path = [];
    for (let s = 0; s <= step; s++) {
      const on = [];
      for (let r = 0; r < m.P; r++) {
        const span = m.held[s][5 * r + KV];
        if (span && chipsOf(m, span).includes(chip)) on.push(r);
      }
      const text = on.length ? `rank${on.length > 1 ? 's' : ''} ${rankList(on)}` : '';
      if (text && text !== path[path.length - 1]) path.push(text);
    }
    return path;
  }

  function pairText(m, step, token) {
    const { query: q, key: k } = token,
      name = (b) => (m.exact ? String(b) : `[${m.borders[b]}, ${m.borders[b + 1]})`),
      by = [];
    for (let s = 0; s <= step; s++)
      for (const f of fillsOf(m, s)) {
        const i = binsOf(m, f.rows).indexOf(q),
          j = binsOf(m, f.keys).indexOf(k);
        if (i >= 0 && j >= 0 && computes(m, f, q, k, i, j))
          by.push(`rank ${f.rank} ${headText(f.heads)} at ${m.steps[s].stage}`);
      }
    const state = !m.allowed[q][k]
      ? by.length
        ? 'masked, and computed all the same: '
        : 'masked, not to be computed'
      : by.length
        ? 'computed by '
        : 'not computed yet';
    return `Query ${name(q)} × key ${name(k)}: ${state}${by.slice(0, 4).join(', ')}${by.length > 4 ? ` and ${by.length - 4} more` : ''}.`;
  }

  /** Cells that are allowed and that no step up to this one computed; null when there are none. */
  function missingCells(m, step) {
    const flags = new Uint8Array(m.bins * m.bins);
    let any = 0;
    m.allowed.forEach((row, q) =>
      row.forEach((v, k) => {
        if (v) {
          flags[q * m.bins + k] = 1;
          any++;
        }
      }),
    );
    for (let s = 0; s <= step; s++)
      for (const f of fillsOf(m, s)) {
        const ks = binsOf(m, f.keys);
        binsOf(m, f.rows).forEach((q, i) => {
          for (let j = 0; j < ks.length; j++) {
            const at = q * m.bins + ks[j];
            if (flags[at] && computes(m, f, q, ks[j], i, j)) {
              flags[at] = 0;
              any--;
            }
          }
        });
      }
    return any ? flags : null;
  }

  /** Sentences about a rank's accumulator at a step. */
  function aboutWeights(m, step, rank) {
    const { merged, pending } = m.accumulators[step][rank],
      total = merged.reduce((s, p) => s + p.weight, 0);
    if (!merged.length) return [];
    const shares = merged.map((p) => `hop ${p.hop} ${Math.round((100 * p.weight) / total)} %`).join(', ');
    const of = m.measured
      ? 'of the softmax over the keys met so far, on average over its rows and heads'
      : 'of the pairs so far';
    return [
      `Accumulator of rank ${rank}`,
      `${shares} ${of}.`,
      ...(pending ? [`Hop ${pending.hop} waits to be merged by log-sum-exp.`] : []),
    ];
  }

  function tableOf(m, number, limit) {
    const rows = [];
    let total = 0;
    for (const g of m.steps[number].events) {
      const odd = new Map();
      for (let i = 0; i < g.odd.length; i += 2) odd.set(g.odd[i], g.odd[i + 1]);
      g.src.forEach((src, i) => {
        total++;
        if (rows.length >= limit) return;
        const dst = g.dst[i],
          heads = g.heads[i],
          each = m.data.row_bytes * (g.tensor === 'KV' ? 2 : 1);
        const bytes = odd.has(i)
          ? odd.get(i)
          : src === dst
            ? 0
            : rowCount(m.spans[g.rows[i]]) * (last(heads) - first(heads)) * each;
        rows.push([
          g.op.replace(/_/g, '-'),
          src,
          dst,
          g.tensor,
          spanText(m.spans[g.rows[i]], 6),
          `[${first(heads)}, ${last(heads)})`,
          grouped(bytes),
          g.keys ? spanText(m.spans[g.keys[i]], 6) : '',
          g.pairs ? grouped(g.pairs[i]) : '',
        ]);
      });
    }
    return { rows, total };
  }

  function textOf(m, number) {
    const step = m.steps[number],
      out = [`Step ${number} of ${m.steps.length - 1}: ${step.title}${step.ghost ? ' (not run)' : ''}`, step.caption];
    if (step.why) out.push(step.why);
    const words = ['Q', 'K/V', 'arriving K/V', 'partial output', 'output'];
    for (let r = 0; r < m.P; r++) {
      const held = words
        .map((word, lane) => {
          const span = m.held[number][5 * r + lane],
            heads = m.bands[number][5 * r + lane];
          return span ? `${word} ${spanText(m.spans[span], 6)} heads [${first(heads)}, ${last(heads)})` : '';
        })
        .filter(Boolean);
      out.push(`rank ${r}: ${held.join('; ') || 'nothing'}`);
    }
    return out.join('\n');
  }

  // -- the player itself ------------------------------------------------------------------------

  const ICONS = {
    first: 'M3 3h2v10H3zM13 3v10L6 8z',
    back: 'M11 3v10L4 8z',
    play: 'M4 2.5v11L13 8z',
    pause: 'M4 3h3v10H4zM9 3h3v10H9z',
    next: 'M5 3v10l7-5z',
    last: 'M11 3h2v10h-2zM3 3v10l7-5z',
  };
  const JUMPS = [
    ['collective', 'Next collective', (ops) => ops.has('all_to_all') || ops.has('send')],
    ['hop', 'Next hop', (ops) => ops.has('attend')],
    ['merge', 'Next merge', (ops) => ops.has('merge')],
  ];
  const KEYS = [
    ['Space', 'play or pause'],
    ['← →', 'one step back or on'],
    ['Page Up, Page Down', 'the same, for clickers'],
    ['Home, End', 'first or last step'],
    ['C, H, M', 'next collective, hop or merge'],
    ['↑ ↓', 'token before or after; its rows, heads and path appear below'],
    ['Esc', 'let go of the token'],
    ['?', 'this help'],
  ];
  const WORDS = [
    ['rank', 'one process with its device; a card'],
    ['shard', 'the rows of the sequence that a rank holds'],
    ['all-to-all', 'ranks of one Ulysses group swap rows for heads, along a row of cards'],
    ['hop', 'one turn of the ring: K/V moves one card down its column while the one before is attended'],
    ['LSE', 'log-sum-exp of the scores; by it partial outputs are weighted when they are merged'],
  ];

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const name in attributes || {}) {
      const v = attributes[name];
      if (v === true) node.setAttribute(name, '');
      else if (v !== false && v !== null && v !== undefined) node.setAttribute(name, v);
    }
    for (const child of children) node.append(child);
    return node;
  }

  function icon(name) {
    const NS = 'http://www.w3.org/2000/svg',
      svg = document.createElementNS(NS, 'svg'),
      path = document.createElementNS(NS, 'path');
    svg.setAttribute('viewBox', '0 0 16 16');
    svg.setAttribute('aria-hidden', 'true');
    path.setAttribute('d', ICONS[name]);
    svg.append(path);
    return svg;
  }

  /**
   * A player inside `root`. Options: theme ('auto' | 'light' | 'dark'), globalKeys (listen on the whole
   * document), onFork (step => …; shows the fork button), ready (player => …).
   */
  global.USPPlayer = function (root, options) {
    options = options || {};
    const stop = new AbortController(),
      listeners = new Map(),
      calm = matchMedia('(prefers-reduced-motion: reduce)');
    const on = (target, event, handler, more) =>
      target.addEventListener(event, handler, { signal: stop.signal, ...more });
    const emit = (event, value) => {
      for (const handler of listeners.get(event) || []) handler(value);
    };
    let m = null,
      g = null,
      paint = null,
      theme = null,
      scale = 1,
      pos = 0,
      shown = -1,
      playing = false,
      frame = 0,
      lastTime = 0,
      goal = null;
    let token = null,
      pinned = false,
      moves = new Map(),
      ground = { key: '' },
      speed = 1,
      themeMode = options.theme || 'auto',
      colourBy = 'rank';

    // Elements ----------------------------------------------------------------------------------
    const ui = {};
    const button = (name, label, content) => {
      const b = el('button', { type: 'button', 'data-do': name, 'aria-label': label, title: label });
      b.append(content);
      return b;
    };
    ui.legend = el('ul', { class: 'usp-legend', 'aria-label': 'Colours' });
    ui.badge = el('span', { class: 'usp-badge' });
    ui.head = el('div', { class: 'usp-head' }, ui.legend, ui.badge);
    ui.base = el('canvas', { 'aria-hidden': 'true' });
    ui.fx = el('canvas', { 'aria-hidden': 'true' });
    ui.over = el('canvas', { 'aria-hidden': 'true' });
    ui.tip = el('div', { class: 'usp-tip', hidden: true });
    ui.stage = el(
      'div',
      {
        class: 'usp-stage',
        tabindex: '0',
        role: 'group',
        'aria-roledescription': 'replay',
        'aria-label': 'Picture of the replay',
      },
      ui.base,
      ui.fx,
      ui.over,
      ui.tip,
    );
    ui.title = el('h2');
    ui.ghost = el('span', { class: 'usp-ghost', hidden: true });
    ui.caption = el('p');
    ui.why = el('p', { class: 'usp-why' });
    ui.words = el(
      'div',
      { class: 'usp-caption', 'aria-live': 'polite', 'aria-atomic': 'true' },
      ui.title,
      ui.ghost,
      ui.caption,
      ui.why,
    );
    ui.range = el('input', { type: 'range', min: '0', max: '0', step: 'any', value: '0', 'aria-label': 'Step' });
    ui.stages = el('div', { class: 'usp-stages', role: 'group', 'aria-label': 'Stages' });
    ui.rail = el('div', { class: 'usp-rail' }, ui.range, ui.stages);
    ui.playIcon = el('span');
    ui.playText = el('span', null, 'Play');
    ui.play = el('button', { type: 'button', class: 'usp-play', 'data-do': 'play' }, ui.playIcon, ui.playText);
    ui.count = el('span', { class: 'usp-count' });
    ui.speed = el(
      'select',
      { 'aria-label': 'Speed' },
      ...[0.5, 1, 2, 4].map((v) => {
        const o = el('option', { value: v }, `${v}×`);
        o.selected = v === 1;
        return o;
      }),
    );
    ui.jumps = JUMPS.map(([name, label]) => el('button', { type: 'button', 'data-do': name, title: label }, label));
    ui.fork = el(
      'button',
      { type: 'button', 'data-do': 'fork', title: 'Change the scenario from this step on' },
      'Fork here',
    );
    ui.token = el('input', {
      type: 'number',
      min: '0',
      step: '1',
      inputmode: 'numeric',
      'aria-label': 'Token, by row number',
      placeholder: 'row',
    });
    ui.colour = el(
      'select',
      { 'aria-label': 'Colour of the chips' },
      el('option', { value: 'document' }, 'colour: document'),
      el('option', { value: 'rank' }, 'colour: first rank'),
    );
    ui.help = button('help', 'Keys and words', '?');
    ui.bar = el(
      'div',
      { class: 'usp-bar', role: 'group', 'aria-label': 'Controls' },
      el(
        'span',
        { class: 'usp-group' },
        button('first', 'First step', icon('first')),
        button('back', 'Step back', icon('back')),
      ),
      ui.play,
      el(
        'span',
        { class: 'usp-group' },
        button('next', 'Step on', icon('next')),
        button('last', 'Last step', icon('last')),
      ),
      ui.count,
      ui.speed,
      el('span', { class: 'usp-group' }, ...ui.jumps),
      el('span', { class: 'usp-gap' }),
      ui.colour,
      ui.fork,
      ui.help,
    );
    ui.about = el('div', { class: 'usp-lines', 'aria-live': 'polite' });
    ui.panel = el(
      'div',
      { class: 'usp-about', role: 'group', 'aria-label': 'Follow a token' },
      el('label', null, 'Token ', ui.token),
      ui.about,
    );
    ui.tableHead = el('tr');
    ui.tableBody = el('tbody');
    ui.tableNote = el('p', { class: 'usp-why' });
    ['what', 'from', 'to', 'tensor', 'rows', 'heads', 'bytes', 'keys', 'pairs'].forEach((name) =>
      ui.tableHead.append(
        el('th', { scope: 'col', class: name === 'bytes' || name === 'pairs' ? 'usp-n' : null }, name),
      ),
    );
    ui.table = el(
      'details',
      null,
      el('summary', null, 'This step as a table'),
      el(
        'div',
        { class: 'usp-scroll', tabindex: '0', role: 'region', 'aria-label': 'Events of this step' },
        el('table', null, el('thead', null, ui.tableHead), ui.tableBody),
        ui.tableNote,
      ),
    );
    ui.pre = el('pre');
    ui.text = el(
      'details',
      null,
      el('summary', null, 'This step as text'),
      el('div', { class: 'usp-scroll', tabindex: '0', role: 'region', 'aria-label': 'This step as text' }, ui.pre),
    );
    ui.dialog = el(
      'dialog',
      { 'aria-label': 'Keys and words' },
      el('h2', null, 'Keys'),
      list(KEYS),
      el('h2', null, 'Words'),
      list(WORDS),
      el('button', { type: 'button', 'data-do': 'close' }, 'Close'),
    );
    const box = el(
      'div',
      { class: 'usp', 'data-state': 'empty' },
      ui.head,
      ui.stage,
      el('div', { class: 'usp-below' }, ui.words, ui.panel),
      ui.rail,
      ui.bar,
      el('div', { class: 'usp-same' }, ui.table, ui.text),
      ui.dialog,
    );
    root.replaceChildren(box);

    function list(pairs) {
      const dl = el('dl');
      for (const [term, text] of pairs) dl.append(el('dt', null, term), el('dd', null, text));
      return dl;
    }

    // Theme and size ----------------------------------------------------------------------------
    function readTheme() {
      const gradio = document.querySelector('.gradio-container'),
        prefers = matchMedia('(prefers-color-scheme: dark)').matches;
      const page = document.documentElement.dataset.theme,
        dark =
          themeMode === 'auto'
            ? gradio
              ? document.body.classList.contains('dark')
              : page === 'dark' || (page !== 'light' && prefers)
            : themeMode === 'dark';
      box.dataset.theme = dark ? 'dark' : 'light';
      const css = getComputedStyle(box),
        v = (name) => css.getPropertyValue('--usp-' + name).trim();
      theme = { dark, font: css.fontFamily, colours: [] };
      for (const name of ['panel', 'slot', 'ink', 'muted', 'line', 'edge', 'accent', 'ok', 'bad'])
        theme[name] = v(name);
      for (let i = 0; i < COLOURS; i++) theme.colours.push(v('c' + i));
      rebuild();
    }

    function rebuild() {
      if (!m || !theme) return;
      const w = ui.stage.clientWidth,
        h = ui.stage.clientHeight;
      if (!w || !h) return;
      const em = parseFloat(getComputedStyle(box).fontSize);
      scale = Math.min(devicePixelRatio || 1, 2, Math.sqrt(9e6 / (w * h)));
      for (const canvas of [ui.base, ui.fx, ui.over]) {
        canvas.width = Math.round(w * scale);
        canvas.height = Math.round(h * scale);
      }
      g = place(m, w, h, em);
      legend();
      paint = Painter(
        m,
        g,
        theme,
        (chip) => (chip.origin < 0 ? -1 : colourBy === 'document' ? (chip.doc + 4) % COLOURS : hue(m, chip.origin)),
        scale,
      );
      ground = { key: '' };
      draw();
    }

    // Drawing -----------------------------------------------------------------------------------
    const stepAt = () => Math.max(0, Math.min(m.steps.length - 1, Math.ceil(pos - 1e-6)));
    function draw() {
      if (!m || !g) return;
      const step = stepAt(),
        raw = 1 - (step - pos),
        whole = raw > 1 - 1e-6 || step === 0,
        t = whole ? 1 : clamp(raw / 0.72);
      if (!moves.has(step)) {
        if (moves.size > 4) moves.clear();
        moves.set(step, flights(m, step));
      }
      const move = moves.get(step),
        phase = whole ? 'whole' : move.slide && t < 0.26 ? 'slide' : 'go',
        key = `${step} ${phase}`;
      if (ground.key !== key) {
        background(step, phase, move);
        ground.key = key;
        ground.over = '';
      }
      const cx = ui.fx.getContext('2d');
      cx.setTransform(scale, 0, 0, scale, 0, 0);
      cx.clearRect(0, 0, g.w, g.h);
      if (!whole) {
        const work = move.slide ? clamp((t - 0.26) / 0.74) : t;
        paint.partials(cx, step, work, '');
        paint.bars(cx, step, ease(work));
        paint.fly(cx, step, move, t);
        paint.ledgerFill(cx, step, work);
      }
      const over = `${key} ${token ? [token.chip, token.key, token.query] : ''}`;
      if (ground.over !== over) {
        foreground(step);
        ground.over = over;
      }
      if (step !== shown) announce(step);
      ui.range.value = String(pos);
      ui.range.style.setProperty('--at', `${m.steps.length > 1 ? (100 * pos) / (m.steps.length - 1) : 0}%`);
    }

    /** Lines, names and the cursor, over everything that moves. */
    function foreground(step) {
      const cx = ui.over.getContext('2d');
      cx.setTransform(scale, 0, 0, scale, 0, 0);
      cx.clearRect(0, 0, g.w, g.h);
      paint.ledgerLines(cx);
      paint.ledgerTexts(cx, step);
      paint.difference(cx, step);
      paint.cursor(cx, step, token);
    }

    function background(step, phase, move) {
      const whole = phase === 'whole';
      const cx = ui.base.getContext('2d');
      cx.setTransform(scale, 0, 0, scale, 0, 0);
      cx.clearRect(0, 0, g.w, g.h);
      paint.ground(cx, step);
      paint.arrows(cx, step, !whole || step > 0);
      const none = new Set();
      if (whole) {
        paint.rest(cx, step, none, false);
        paint.partials(cx, step, 1, 'both');
        paint.bars(cx, step, 1);
      } else {
        paint.rest(
          cx,
          move.moving.size ? step : step - 1,
          move.moving,
          move.slide ? (phase === 'go' ? 'in' : 'out') : '',
        );
        paint.partials(cx, step, 0, 'only');
      }
      paint.ledgerGround(cx, scale);
      paint.ledgerAt(cx, step, whole ? 1 : 0);
      if (whole) paint.missing(cx, step);
    }

    function announce(step) {
      shown = step;
      const s = m.steps[step],
        at = `Step ${step} of ${m.steps.length - 1}`;
      ui.title.textContent = s.title;
      ui.ghost.hidden = !s.ghost;
      ui.ghost.textContent =
        m.data.beyond === 'extended' ? 'not run: the ring-aware path' : 'not run: behind the guard';
      ui.caption.textContent = s.caption;
      ui.why.textContent = s.why;
      ui.count.textContent = at;
      ui.range.setAttribute('aria-valuetext', `${at}: ${s.title}`);
      for (const b of ui.stages.children) {
        const a = Number(b.dataset.from),
          here = step >= a && step <= Number(b.dataset.to);
        if (here) b.setAttribute('aria-current', 'step');
        else b.removeAttribute('aria-current');
      }
      for (const [i, [, , wanted]] of JUMPS.entries())
        ui.jumps[i].disabled = !m.ops.some((ops, n) => n > step && wanted(ops));
      ui.stage.setAttribute(
        'aria-label',
        `Picture of the replay. ${at}: ${s.title}. Arrow keys step and choose a token; ? shows all keys.`,
      );
      box.dataset.step = step;
      box.dataset.ghost = s.ghost;
      same();
      tell();
      emit('step', step);
    }

    function same() {
      if (!m || shown < 0) return;
      if (ui.table.open) {
        const { rows, total } = tableOf(m, shown, 400);
        ui.tableBody.replaceChildren(
          ...rows.map((row) =>
            el(
              'tr',
              null,
              ...row.map((text, i) => el('td', { class: i === 6 || i === 8 ? 'usp-n' : null }, String(text))),
            ),
          ),
        );
        ui.tableNote.textContent =
          total > rows.length ? `${grouped(total - rows.length)} more events are not listed.` : '';
      }
      if (ui.text.open) ui.pre.textContent = textOf(m, shown);
    }

    function tell() {
      if (!m) return;
      ui.about.replaceChildren(...(token ? about(m, stepAt(), token) : [idle()]).map((line) => el('p', null, line)));
      ui.about.dataset.idle = token ? '' : 'yes';
      box.dataset.token = token ? token.chip : '';
    }

    function idle() {
      const n = m.data.rows_per_chip,
        chips = n > 1 ? `Each chip stands for up to ${n} rows. ` : '';
      return `${chips}Point at a chip or a pair, or type a row number, to follow one row through the ranks.`;
    }

    // Legend, badge, rail -----------------------------------------------------------------------
    function swatch(index) {
      const NS = 'http://www.w3.org/2000/svg',
        svg = document.createElementNS(NS, 'svg'),
        r = document.createElementNS(NS, 'rect');
      svg.setAttribute('viewBox', '0 0 16 16');
      svg.setAttribute('aria-hidden', 'true');
      r.setAttribute('width', '16');
      r.setAttribute('height', '16');
      r.setAttribute('rx', '4');
      r.style.fill = index < 0 ? 'var(--usp-edge)' : `var(--usp-c${index})`;
      svg.append(r);
      return svg;
    }

    function legend() {
      if (!m) return;
      const items = [],
        add = (index, text) => {
          const li = el('li');
          if (index !== null) li.append(swatch(index));
          li.append(text);
          items.push(li);
        };
      if (colourBy === 'document') {
        let row = 0;
        m.data.documents.forEach((n, d) => {
          if (n && d < COLOURS) add((d + 4) % COLOURS, `document ${d} · rows [${row}, ${row + n})`);
          row += n;
        });
        if (m.data.documents.length > COLOURS) add(null, `colours repeat every ${COLOURS} documents`);
      } else {
        const ring = byRing(m),
          n = ring ? m.R : m.P;
        add(null, ring ? 'Rows that start at ring position' : 'Rows that start on');
        for (let p = 0; p < Math.min(n, COLOURS); p++) add(p, ring ? `${p}` : `rank ${m.rankAt[p]}`);
        if (n > COLOURS) add(null, `then the same colours again, to ${n - 1}`);
      }
      if (m.before || m.chips.some((c) => c.origin < 0)) add(-1, 'copies on every rank');
      if (m.U > 1 && m.data.heads > 1) add(null, `in a chip, heads 0–${m.data.heads - 1} from top to bottom`);
      if (g && g.level < 2)
        add(
          null,
          `lanes in a card: ${g.rows.map((lane) => ({ [Q]: 'Q', [KV]: 'K V', [NEXT]: 'next K V', [OUT]: 'output' })[lane]).join(', ')}${g.barY === null ? '' : ', LSE weight'}`,
        );
      ui.legend.replaceChildren(...items);
    }

    function badge() {
      const b = m.data.badge,
        jumps = b.step !== undefined;
      const node = el(
        jumps ? 'button' : 'span',
        { class: 'usp-badge', 'data-kind': b.kind, type: jumps ? 'button' : null, 'data-do': jumps ? 'badge' : null },
        b.text,
      );
      ui.badge.replaceWith(node);
      ui.badge = node;
    }

    function rail() {
      const n = m.steps.length,
        buttons = [];
      ui.range.max = String(Math.max(0, n - 1));
      let a = 0;
      while (a < n) {
        let b = a;
        while (b + 1 < n && m.steps[b + 1].stage === m.steps[a].stage && m.steps[b + 1].ghost === m.steps[a].ghost) b++;
        const name =
          { shard: 'shards', guard: 'refused', crash: 'crashed', output: 'done' }[m.steps[a].stage] ||
          m.steps[a].stage.replace('all-to-all', 'all‑to‑all');
        const node = el(
          'button',
          {
            type: 'button',
            'data-from': a,
            'data-to': b,
            'aria-label': `Go to ${m.steps[a].stage}`,
            class: m.steps[a].ghost ? 'usp-ghosted' : null,
          },
          name,
        );
        node.style.left = `${n > 1 ? (100 * a) / (n - 1) : 0}%`;
        buttons.push(node);
        a = b + 1;
      }
      ui.stages.replaceChildren(...buttons);
      thin();
    }

    /** Hide stage names that would overlap; the slider still reaches every step. */
    function thin() {
      let edge = -1e9;
      const nodes = [...ui.stages.children];
      for (const node of nodes) node.style.visibility = '';
      const rects = nodes.map((node) => node.getBoundingClientRect()),
        end = rects.length ? rects[rects.length - 1].left : 0;
      nodes.forEach((node, i) => {
        const lastOne = i === nodes.length - 1,
          hide = rects[i].left < edge + 2 || (!lastOne && rects[i].right > end - 2);
        node.style.visibility = hide && !lastOne ? 'hidden' : '';
        if (!hide) edge = rects[i].right;
      });
    }

    // Moving in time ----------------------------------------------------------------------------
    const duration = (step) => {
      const ops = m.ops[step];
      return ops.has('all_to_all') || ops.has('send')
        ? 2400
        : ops.has('attend')
          ? 2000
          : ops.has('merge')
            ? 1700
            : 1100;
    };
    function status() {
      box.dataset.state = !m
        ? 'empty'
        : playing
          ? 'playing'
          : goal !== null
            ? 'moving'
            : pos >= m.steps.length - 1
              ? 'ended'
              : 'paused';
      ui.playIcon.replaceChildren(icon(playing ? 'pause' : 'play'));
      ui.playText.textContent = playing ? 'Pause' : 'Play';
      ui.play.setAttribute('aria-label', playing ? 'Pause' : 'Play');
    }
    function halt() {
      const was = playing;
      playing = false;
      goal = null;
      cancelAnimationFrame(frame);
      frame = 0;
      status();
      if (was) emit('pause', stepAt());
    }
    function seek(to) {
      if (!m) return;
      halt();
      pos = Math.max(0, Math.min(m.steps.length - 1, to));
      hideTip();
      draw();
      status();
    }
    function glide(to) {
      if (!m) return;
      const from = goal !== null ? goal : stepAt();
      halt();
      to = Math.max(0, Math.min(m.steps.length - 1, to));
      if (calm.matches || to !== from + 1) {
        seek(to);
        return;
      }
      pos = from + 1e-4; // already on its way: the words are those of the step to come
      goal = to;
      hideTip();
      status();
      draw();
      start();
    }
    const current = () => (goal !== null ? goal : stepAt());
    function play() {
      if (!m || playing || m.steps.length < 2) return;
      if (pos >= m.steps.length - 1) pos = 0;
      goal = null;
      playing = true;
      hideTip();
      status();
      draw();
      emit('play', stepAt());
      start();
    }
    function start() {
      lastTime = 0;
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(tick);
    }
    let rest = 0;
    function tick(now) {
      if (!root.isConnected) {
        destroy();
        return;
      }
      const dt = lastTime ? Math.min(100, now - lastTime) : 0;
      lastTime = now;
      const end = goal !== null ? goal : m.steps.length - 1;
      if (calm.matches && playing) {
        rest += dt;
        if (rest > 2600 / speed) {
          rest = 0;
          pos = Math.min(end, Math.floor(pos + 1e-6) + 1);
          draw();
        }
      } else {
        const step = Math.min(end, Math.floor(pos + 1e-6) + 1);
        pos = Math.min(end, pos + (dt * speed * (goal !== null ? 1.6 : 1)) / duration(step));
        draw();
      }
      if (pos >= end) {
        pos = end;
        draw();
        goal = null;
        const was = playing;
        playing = false;
        frame = 0;
        status();
        if (was) emit('end', end);
        return;
      }
      frame = requestAnimationFrame(tick);
    }
    function jump(wanted) {
      const from = current();
      for (let n = from + 1; n < m.steps.length; n++)
        if (wanted(m.ops[n])) {
          glide(n);
          return;
        }
    }

    // Pointing ----------------------------------------------------------------------------------
    function pick(x, y) {
      const { x: lx, y: ly, side } = g.led;
      if (x >= lx && y >= ly && x < lx + side && y < ly + side) {
        const query = Math.floor(((y - ly) / side) * m.bins),
          key = Math.floor(((x - lx) / side) * m.bins),
          row = m.borders[query];
        const chip = m.chips.findIndex(
          (c) => row >= c.start && row <= c.start + (c.count - 1) * c.step && (row - c.start) % c.step === 0,
        );
        return chip < 0 ? null : { chip, query, key };
      }
      const card = g.cards.find((c) => x >= c.x && x < c.x + c.w && y >= c.y && y < c.y + c.h);
      if (!card) return null;
      const step = stepAt();
      for (const lane of g.rows) {
        const top = card.y + g.laneY[lane];
        if (y < top - g.skip / 2 || y > top + g.lane + g.skip / 2) continue;
        const i = 5 * card.rank,
          span = lane === OUT ? m.held[step][i + OUTPUT] || m.held[step][i + PARTIAL] : m.held[step][i + lane];
        if (!span) continue;
        for (const c of chipsOf(m, span)) {
          const chip = m.chips[c],
            cx = card.x + slotX(g, chip),
            cy = top + slotY(g, chip);
          if (x >= cx - 1 && x <= cx + g.pitch && y >= cy - 2 && y <= cy + lineH(g) + 2) return { chip: c };
        }
      }
      return null;
    }
    function setToken(next, stay) {
      token = next;
      pinned = Boolean(next && stay);
      const chip = token && m.chips[token.chip];
      if (document.activeElement !== ui.token) ui.token.value = chip ? chip.start : '';
      tell();
      if (!frame) draw();
      emit('token', chip ? chip.start : null);
    }
    function hideTip() {
      ui.tip.hidden = true;
    }
    function showTip(x, y, lines) {
      ui.tip.replaceChildren(...(lines || about(m, stepAt(), token)).map((line) => el('p', null, line)));
      ui.tip.hidden = false;
      const w = ui.tip.offsetWidth,
        h = ui.tip.offsetHeight;
      ui.tip.style.left = `${Math.max(0, Math.min(g.w - w, x + 16 + w > g.w ? x - w - 12 : x + 16))}px`;
      ui.tip.style.top = `${Math.max(-40, y + 18 + h > g.h ? y - h - 12 : y + 18)}px`;
    }
    on(ui.stage, 'pointermove', (e) => {
      if (!m || playing || goal !== null || pinned) return;
      const r = ui.stage.getBoundingClientRect(),
        x = e.clientX - r.left,
        y = e.clientY - r.top,
        found = pick(x, y);
      if (!found) {
        if (token) setToken(null);
        const card =
          g.barY !== null &&
          g.cards.find(
            (c) => x >= c.x + g.laneX && x < c.x + c.w && y >= c.y + g.barY - 2 && y <= c.y + g.barY + g.barH + 4,
          );
        const lines = card ? aboutWeights(m, stepAt(), card.rank) : [];
        if (lines.length) showTip(x, y, lines);
        else hideTip();
        return;
      }
      if (!token || token.chip !== found.chip || token.key !== found.key || token.query !== found.query)
        setToken(found);
      showTip(x, y);
    });
    on(ui.stage, 'pointerleave', () => {
      hideTip();
      if (!pinned && token) setToken(null);
    });
    on(ui.stage, 'click', (e) => {
      if (!m) return;
      const r = ui.stage.getBoundingClientRect(),
        x = e.clientX - r.left,
        y = e.clientY - r.top,
        found = pick(x, y);
      const again = pinned && found && token && token.chip === found.chip;
      setToken(again ? null : found, true);
      if (token) showTip(x, y);
      else hideTip();
    });
    const byRow = () => m.chips.map((_, i) => i).sort((a, b) => m.chips[a].start - m.chips[b].start);
    function walk(by) {
      const order = m.byRow || (m.byRow = byRow()),
        at = token ? order.indexOf(token.chip) : by > 0 ? -1 : 0;
      setToken({ chip: order[(at + by + order.length) % order.length] }, true);
      hideTip();
    }
    on(ui.token, 'input', () => {
      const row = Number(ui.token.value);
      if (!m || ui.token.value === '' || !Number.isInteger(row)) {
        setToken(null);
        return;
      }
      const chip = m.chips.findIndex(
        (c) => row >= c.start && row <= c.start + (c.count - 1) * c.step && (row - c.start) % c.step === 0,
      );
      setToken(chip < 0 ? null : { chip }, true);
    });

    // Controls and keys -------------------------------------------------------------------------
    const acts = {
      first: () => seek(0),
      back: () => glide(Math.ceil(current() - 1)),
      play: () => (playing ? (seekWhole(), 0) : play()),
      next: () => glide(current() + 1),
      last: () => seek(1e9),
      fork: () => {
        emit('fork', stepAt());
        if (options.onFork) options.onFork(stepAt());
      },
      help: () => ui.dialog.showModal(),
      close: () => ui.dialog.close(),
      badge: () => seek(m.data.badge.step),
    };
    for (const [name, , wanted] of JUMPS) acts[name] = () => jump(wanted);
    function seekWhole() {
      halt();
      draw();
    }
    on(box, 'click', (e) => {
      const target = e.target.closest('button');
      if (!target || !m) return;
      if (target.dataset.do) acts[target.dataset.do]();
      else if (target.dataset.from) seek(Number(target.dataset.from));
    });
    on(ui.range, 'input', () => {
      const to = Number(ui.range.value);
      seek(calm.matches ? Math.round(to) : to);
    });
    on(ui.range, 'change', () => {
      const to = Number(ui.range.value);
      if (Math.abs(to - Math.round(to)) < 0.12) seek(Math.round(to));
    });
    on(ui.speed, 'change', () => {
      speed = Number(ui.speed.value);
    });
    on(ui.colour, 'change', () => {
      colourBy = ui.colour.value;
      rebuild();
    });
    on(ui.table, 'toggle', same);
    on(ui.text, 'toggle', same);
    function keys(e) {
      if (!m || e.defaultPrevented || e.altKey || e.ctrlKey || e.metaKey) return;
      if (document.querySelector(':modal')) return; // its own keys, Escape above all
      const target = e.target,
        tag = target.tagName,
        typing =
          tag === 'TEXTAREA' ||
          tag === 'SELECT' ||
          (tag === 'INPUT' && target.type !== 'range') ||
          target.isContentEditable;
      if (typing && !(e.key === 'Escape' && target === ui.token)) return;
      if (e.key === ' ' && (tag === 'BUTTON' || tag === 'SUMMARY')) return;
      if ((e.key === 'ArrowUp' || e.key === 'ArrowDown') && target !== ui.stage) {
        if (target.closest && target.closest('.usp-scroll, .usp-bar, .usp-about')) return;
        if (!options.globalKeys || box.contains(target)) return;
      }
      const act = {
        ' ': acts.play,
        ArrowRight: acts.next,
        ArrowLeft: acts.back,
        PageDown: acts.next,
        PageUp: acts.back,
        Home: acts.first,
        End: acts.last,
        ArrowDown: () => walk(1),
        ArrowUp: () => walk(-1),
        '?': acts.help,
        Escape: token && (() => setToken(null)),
        c: acts.collective,
        h: acts.hop,
        m: acts.merge,
      }[e.key.length === 1 ? e.key.toLowerCase() : e.key];
      if (!act) return;
      act();
      e.preventDefault();
      e.stopPropagation();
    }
    on(options.globalKeys ? document : box, 'keydown', keys);

    const watchTheme = new MutationObserver(() => readTheme()),
      watchSize = new ResizeObserver(() => {
        rebuild();
        if (m) thin();
      });
    watchTheme.observe(document.body, { attributes: true, attributeFilter: ['class'] });
    watchTheme.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] });
    watchSize.observe(ui.stage);
    on(matchMedia('(prefers-color-scheme: dark)'), 'change', readTheme);
    function destroy() {
      halt();
      stop.abort();
      watchTheme.disconnect();
      watchSize.disconnect();
    }

    function load(scene, at) {
      halt();
      m = read(typeof scene === 'string' ? JSON.parse(scene) : scene);
      m.ops = m.steps.map((s) => new Set(s.events.map((e) => e.op)));
      const packed = m.data.documents.length > 1;
      colourBy = packed ? 'document' : 'rank';
      ui.colour.hidden = !packed;
      ui.colour.value = colourBy;
      ui.fork.hidden = !options.onFork;
      moves = new Map();
      token = null;
      pinned = false;
      shown = -1;
      pos = Math.max(0, Math.min(m.steps.length - 1, at || 0));
      ui.token.max = String(m.size - 1);
      hideTip();
      badge();
      rail();
      readTheme();
      draw();
      status();
      emit('load', m.steps.length);
    }

    const player = {
      load,
      seek,
      play,
      pause: seekWhole,
      destroy,
      step: (by) => glide(current() + (by === undefined ? 1 : by)),
      setTheme: (mode) => {
        themeMode = mode;
        readTheme();
      },
      setSpeed: (factor) => {
        speed = factor;
      },
      /** Where a row is drawn in a lane (0 Q, 1 K/V, 2 next, 3 out) of a rank: [x, y] in the window, or null. */
      at: (rank, lane, row) => {
        const chip = m.chips.find(
          (c) => row >= c.start && row <= c.start + (c.count - 1) * c.step && (row - c.start) % c.step === 0,
        );
        if (!chip || g.laneY[lane] === undefined) return null;
        const r = ui.stage.getBoundingClientRect(),
          card = g.cards[rank];
        return [
          r.left + card.x + slotX(g, chip) + g.cell / 2,
          r.top + card.y + g.laneY[lane] + slotY(g, chip) + lineH(g) / 2,
        ];
      },
      /** Where a (query, key) pair is drawn in the ledger: [x, y] in the window. */
      pairAt: (query, key) => {
        const r = ui.stage.getBoundingClientRect(),
          at = (row) => ((lower(m.borders, row) + 0.5) * g.led.side) / m.bins;
        return [r.left + g.led.x + at(key), r.top + g.led.y + at(query)];
      },
      setToken: (row) => {
        const chip = m.chips.findIndex(
          (c) => row >= c.start && row <= c.start + (c.count - 1) * c.step && (row - c.start) % c.step === 0,
        );
        setToken(chip < 0 ? null : { chip }, true);
      },
      on: (event, handler) => {
        if (!listeners.has(event)) listeners.set(event, []);
        listeners.get(event).push(handler);
        return player;
      },
      get state() {
        if (!m) return { status: 'empty' };
        const step = stepAt();
        return {
          status: box.dataset.state,
          step,
          steps: m.steps.length,
          position: pos,
          stage: m.steps[step].stage,
          title: m.steps[step].title,
          caption: m.steps[step].caption,
          ghost: Boolean(m.steps[step].ghost),
          pairs: sumOf(m.pairs[step]),
          allPairs: sumOf(m.totals),
          token: token ? m.chips[token.chip].start : null,
          theme: box.dataset.theme,
          chips: m.chips.length,
          level: g && g.level,
        };
      },
      ledger() {
        return filled(m, stepAt());
      },
      draw,
    };
    status();
    readTheme();
    if (options.ready) options.ready(player);
    return player;
  };

  /** How much of the ledger is filled at a step: cells allowed, filled, forbidden. */
  function filled(m, step) {
    const seen = new Set();
    let forbidden = 0,
      done = 0;
    for (let s = 0; s <= step; s++)
      for (const f of fillsOf(m, s)) {
        const ks = binsOf(m, f.keys);
        binsOf(m, f.rows).forEach((q, i) =>
          ks.forEach((k, j) => {
            if (!computes(m, f, q, k, i, j) || seen.has(q * m.bins + k)) return;
            seen.add(q * m.bins + k);
            if (m.allowed[q][k]) done++;
            else forbidden++;
          }),
        );
      }
    return { allowed: m.allowedCells, done, forbidden };
  }
})(typeof window === 'undefined' ? globalThis : window);
