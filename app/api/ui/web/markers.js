// The markers: rings, dots, crosshair and names above NiiVue's canvas, and which one is at a point.

const SVG = "http://www.w3.org/2000/svg";
const REACH_PX = 5; // how far from a ring it can still be hovered and clicked
const DOT_PX = 0.8;
const [LETTER_PX, LINE_PX] = [7, 18]; // of names

/**
 * Draws panes, one for each tile of the canvas, in CSS pixels: {box: {x, y, width, height}, cross, marks}.
 * `cross` is {x, y, gap}, or null in 3D. A mark is {index, x, y, radius, opacity, name, status, person, plane, sized};
 * what has no `plane` is drawn by NiiVue, and only named here. Rings that are not `sized`, as no 95 % region is known,
 * are dashed: beside wide regions they would look exact.
 */
export class Markers {
  #layer;
  #drawing;
  #names = [];
  marks = []; // all that are drawn

  constructor(layer) {
    this.#layer = layer;
    this.#drawing = layer.appendChild(document.createElementNS(SVG, "svg"));
  }

  /** The one at a point, or null: of those in reach, the one whose centre is nearest. */
  at(x, y) {
    let [best, least] = [null, Infinity];
    for (const mark of this.marks) {
      const distance = Math.hypot(mark.x - x, mark.y - y);
      if (distance <= mark.radius + REACH_PX && distance < least) [best, least] = [mark, distance];
    }
    return best;
  }

  /** `near` are the indexes to highlight; `named` says whether all have their names. */
  draw(panes, near, named) {
    this.marks = panes.flatMap(({ marks }) => marks);
    const frames = fit(this.#drawing, panes, "svg");
    panes.forEach(({ box, cross, marks }, at) => this.#drawPane(frames[at], box, cross, marks, near));
    this.#drawNames(panes, near, named);
  }

  #drawPane(frame, box, cross, marks, near) {
    set(frame, box);
    const [lines, rings] = fit(frame, [0, 0], "g");
    const drawn = marks.filter(({ plane }) => plane !== undefined);
    const beams = cross ? crosshair(box, cross) : [];
    fit(lines, beams, "line").forEach((line, at) => set(line, beams[at]));
    fit(rings, drawn, "g").forEach((group, at) => drawRing(group, drawn[at], box, near));
  }

  #drawNames(panes, near, named) {
    const wanted = panes.flatMap(({ box, marks }) =>
      marks.filter(({ index }) => named || near.includes(index)).map((mark) => ({ mark, ...nameAt(mark, box) })));
    const shown = apart(wanted, ({ mark }) => (near.includes(mark.index) ? 2 : mark.opacity));
    while (this.#names.length < shown.length) {
      this.#names.push(this.#layer.appendChild(document.createElement("span")));
    }
    this.#names.forEach((label, at) => {
      label.hidden = at >= shown.length;
      if (label.hidden) return;
      const { mark, x, y } = shown[at];
      label.textContent = mark.name;
      label.className = near.includes(mark.index) ? "near" : "";
      label.style.opacity = near.includes(mark.index) ? 1 : mark.opacity;
      label.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;
    });
  }
}

/** Where a mark's name is written, and about how wide it is, in CSS pixels. */
function nameAt({ name, x, y, radius }, box) {
  const above = y - radius - 20;
  return { x: x + radius + 3, y: above > box.y ? above : y + radius, width: LETTER_PX * name.length + 10 };
}

/** Those names that lie upon no other, the highest ranks first. */
function apart(names, rank) {
  const kept = [];
  for (const name of [...names].sort((one, other) => rank(other) - rank(one))) {
    const isFree = ({ x, y, width }) =>
      x > name.x + name.width || name.x > x + width || Math.abs(y - name.y) > LINE_PX;
    if (rank(name) > 1 || kept.every(isFree)) kept.push(name);
  }
  return kept;
}

function drawRing(group, mark, box, near) {
  const [x, y] = [mark.x - box.x, mark.y - box.y];
  group.classList.toggle("near", near.includes(mark.index));
  group.classList.toggle("unsized", !mark.sized);
  group.dataset.status = mark.person ? "person" : mark.status;
  group.style.opacity = near.includes(mark.index) ? Math.max(mark.opacity, 0.6) : mark.opacity;
  // The first one is its dark edge, so that it can be seen on bone.
  const circles = fit(group, [0, 0, 0], "circle");
  circles.forEach((circle, at) => {
    set(circle, { cx: x, cy: y, r: at < 2 ? mark.radius : DOT_PX });
    circle.setAttribute("class", ["edge", "ring", "dot"][at]);
  });
}

/** Four lines that leave the middle free. */
function crosshair({ x, y, width, height }, { x: atX, y: atY, gap }) {
  // In the middle of pixels a line is as thin as one.
  const [across, down] = [Math.round(atX - x) + 0.5, Math.round(atY - y) + 0.5];
  return [
    { x1: 0, x2: across - gap, y1: down, y2: down }, { x1: across + gap, x2: width, y1: down, y2: down },
    { x1: across, x2: across, y1: 0, y2: down - gap }, { x1: across, x2: across, y1: down + gap, y2: height },
  ];
}

/** Give a parent as many children as there are things, and return them. */
function fit(parent, things, tag) {
  while (parent.children.length < things.length) parent.append(document.createElementNS(SVG, tag));
  while (parent.children.length > things.length) parent.lastChild.remove();
  return [...parent.children];
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value.toFixed(2));
}
