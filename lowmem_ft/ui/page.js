document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copied button");
  if (!button) return;
  const text = button.parentElement.querySelector("code").textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.parentElement.querySelector("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "copy"), 2000);
});
