"use strict";
// Buttons that open or close everything of a section, and a filter of operators. The page reads well without either.
for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    const open = button.dataset.open === "yes";
    for (const one of button.closest("section").querySelectorAll("details")) one.open = open;
  });
}
const filter = document.getElementById("filter");
filter.addEventListener("input", () => {
  const wanted = filter.value.trim().toLowerCase();
  let shown = 0;
  for (const unit of document.querySelectorAll("#graph details")) {
    let any = false;
    for (const operator of unit.querySelectorAll(".operator")) {
      const fits = operator.textContent.toLowerCase().includes(wanted);
      operator.hidden = !fits;
      operator.style.display = fits ? "" : "none";
      any ||= fits;
      shown += fits;
    }
    unit.style.display = any ? "" : "none";
    if (wanted) unit.open = any;
  }
  document.getElementById("found").textContent = wanted ? `${shown} operators` : "";
});
for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
