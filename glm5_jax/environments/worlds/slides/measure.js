// Returns the facts of a laid-out page: texts by words, pictures, and the slide.
() => {
  // Its own methods, which a picture of such a name hides.
  const named = Document.prototype.querySelectorAll.call(document, '[name]:not(meta)');
  if (named.length) return {problem: 'the attribute name is forbidden'};
  const round = x => Math.round(x * 100) / 100;
  const box = r => [r.left, r.top, r.right, r.bottom].map(round);
  const px = (text, other) => { const x = parseFloat(text); return isNaN(x) ? other : x; };
  const CUTTING = ['hidden', 'clip', 'scroll', 'auto'];
  const styles = new Map();
  const styleOf = e => {
    if (!styles.has(e)) styles.set(e, getComputedStyle(e));
    return styles.get(e);
  };
  const set = (style, name, ...plain) => {
    const value = style[name];
    return value !== undefined && value !== '' && !plain.includes(value);
  };
  const chains = new Map();
  // What an element and those around it do to the texts inside.
  const chain = e => {
    if (!e) return {cut: [-1e6, -1e6, 1e6, 1e6], opacity: 1, moved: false, masked: false,
      animated: false, hidden: false};
    if (chains.has(e)) return chains.get(e);
    const above = chain(e.parentElement), s = styleOf(e), r = e.getBoundingClientRect();
    const found = {...above, cut: [...above.cut]};
    const paints = /paint|strict|content/.test(s.contain) ||
      set(s, 'contentVisibility', 'visible');
    if (paints || CUTTING.includes(s.overflowX)) {
      found.cut[0] = Math.max(found.cut[0], r.left);
      found.cut[2] = Math.min(found.cut[2], r.right);
    }
    if (paints || CUTTING.includes(s.overflowY)) {
      found.cut[1] = Math.max(found.cut[1], r.top);
      found.cut[3] = Math.min(found.cut[3], r.bottom);
    }
    found.opacity *= px(s.opacity, 1);
    found.moved ||= set(s, 'transform', 'none') || set(s, 'scale', 'none') ||
      set(s, 'rotate', 'none') || set(s, 'translate', 'none') || set(s, 'zoom', '1') ||
      set(s, 'perspective', 'none') || set(s, 'offsetPath', 'none');
    found.masked ||= set(s, 'clipPath', 'none') || set(s, 'maskImage', 'none') ||
      set(s, 'webkitMaskImage', 'none') || set(s, 'filter', 'none') ||
      set(s, 'mixBlendMode', 'normal') || set(s, 'clip', 'auto') ||
      set(s, 'webkitBoxReflect', 'none') || set(s, 'backgroundClip', 'border-box',
        'padding-box', 'content-box') || set(s, 'webkitLineClamp', 'none');
    found.animated ||= set(s, 'animationName', 'none') ||
      (set(s, 'transitionDuration', '0s') && px(s.transitionDuration, 0) > 0);
    found.hidden ||= s.display === 'none' || s.visibility !== 'visible' ||
      set(s, 'contentVisibility', 'visible');
    chains.set(e, found);
    return found;
  };
  // Rules that may load, move or show something later; those in others, too.
  const ALLOWED = ['CSSStyleRule', 'CSSMediaRule', 'CSSSupportsRule',
    'CSSNestedDeclarations', 'CSSPageRule'];
  const refused = parent => [...parent.cssRules].flatMap(rule =>
    !ALLOWED.includes(rule.constructor.name) ? [rule.cssText.match(/^@[\w-]*|/)[0]] :
      rule.cssRules && rule.constructor.name !== 'CSSPageRule' ? refused(rule) : []);
  const isBlock = e => !['inline', 'contents'].includes(styleOf(e).display);
  const blocks = [], ids = new Map();
  const blockOf = e => {
    while (e.parentElement && !isBlock(e)) e = e.parentElement;
    if (!ids.has(e)) {
      ids.set(e, blocks.length);
      const r = e.getBoundingClientRect();
      const range = document.createRange();
      range.selectNodeContents(e);
      blocks.push({tag: e.tagName.toLowerCase(), align: styleOf(e).textAlign,
        box: box(r), inner: box(range.getBoundingClientRect()), parent: -1, text: '',
        element: e});
    }
    return ids.get(e);
  };
  const words = [];
  const body = document.body || document.documentElement;
  const walk = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement;
    if (['STYLE', 'SCRIPT', 'TITLE'].includes(e.tagName) || !node.data.trim()) continue;
    const around = chain(e), s = styleOf(e), block = blockOf(e);
    blocks[block].text += ' ' + node.data;
    const size = px(s.fontSize, 0), line = px(s.lineHeight, size * 1.2);
    const facts = {block, size, lines: size ? round(line / size) : 99,
      letters: size ? round(px(s.letterSpacing, 0) / size) : 99,
      gaps: size ? round(px(s.wordSpacing, 0) / size) : 99,
      indent: px(s.textIndent, 0), family: s.fontFamily, colour: s.color,
      weight: px(s.fontWeight, 400), ...around};
    for (const found of node.data.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const rects = [...range.getClientRects()].map(box);
      words.push({text: found[0], rects, ...facts});
      if (words.length > 2000) break;
    }
    if (words.length > 2000) break;
  }
  const parents = new Map();
  for (const block of blocks) {
    const parent = block.element.parentElement;
    if (!parents.has(parent)) parents.set(parent, parents.size);
    block.parent = parents.get(parent);
    delete block.element;
  }
  const everything = [...document.querySelectorAll('*')].slice(0, 5000);
  const generated = everything.some(e => ['::before', '::after', '::marker'].some(p =>
    /[\p{L}\p{N}]{2}/u.test(getComputedStyle(e, p).content.replace(
      /^(normal|none|counters?\(.*\))$/, ''))));
  const overflowing = everything.filter(e => body.contains(e) && e !== body &&
    e.clientWidth > 0 && isBlock(e) && (e.scrollWidth > e.clientWidth + 2 ||
    e.scrollHeight > e.clientHeight + 2)).length;
  const slides = document.querySelectorAll('.slide');
  const root = document.documentElement;
  return {
    mode: document.compatMode, slides: slides.length,
    slide: slides.length ? box(slides[0].getBoundingClientRect()) : [0, 0, 0, 0],
    outside: slides.length ? words.length && [...blocks].length &&
      [...body.children].some(e => e !== slides[0] && !e.contains(slides[0]) &&
        e.getClientRects().length > 0) : true,
    window: [root.scrollWidth, root.scrollHeight], words, blocks, overflowing, generated,
    headings: [...document.querySelectorAll('h1')].map(e => e.textContent),
    images: [...document.images].map(e => ({source: e.getAttribute('src') || '',
      box: box(e.getBoundingClientRect()), natural: [e.naturalWidth, e.naturalHeight],
      fit: styleOf(e).objectFit, around: chain(e)})),
    tags: [...new Set(everything.map(e => e.tagName.toLowerCase()))],
    refused: [...new Set([...document.styleSheets].flatMap(refused))],
    backgrounds: everything.some(e => /url\(/.test(styleOf(e).backgroundImage)),
  };
}
