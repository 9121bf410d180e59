// Sphinx's weights of search results, but for pages that name a word in passing: of equal results the
// guide comes before lessons, and these before the reference of each class.
var Scorer = {
  score: ([page, , , , score]) =>
    score - (page.startsWith("reference/api/") ? 3 : /^(notebooks|reference)\//.test(page) ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
