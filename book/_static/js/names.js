// Names and roles that libraries give wrongly, mended once a page is there.
// A button's name has to hold the words it shows (WCAG 2.5.3), so those words become the name.
document.addEventListener("DOMContentLoaded", () => {
  const all = (selector, mend) => document.querySelectorAll(selector).forEach(mend);
  all("summary[aria-label], .search-button-field", e => e.removeAttribute("aria-label"));
  all(".theme-switch-button [title]", e => e.removeAttribute("title"));   // its own name says it
  all(".citation-list > .citation", e => e.setAttribute("role", "listitem"));
});
