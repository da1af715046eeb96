// An element of the page, which are all in its HTML.

export const element = (id) => document.getElementById(id);
