// The elements of the page, which are all in its HTML.

export const element = (id) => document.getElementById(id);

/**
 * Scroll a box until one of its rows is in sight, below a head of so many pixels. Only the box scrolls: on a phone, the
 * scan stays where it is.
 */
export function reveal(box, row, head = 0) {
  const [top, bottom] = [row.offsetTop - head, row.offsetTop + row.offsetHeight];
  if (top < box.scrollTop) box.scrollTop = top;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
}
