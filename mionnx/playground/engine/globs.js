// Globs as Python's fnmatchcase takes them: `*`, `?`, `[seq]`, `[!seq]`. Time grows with both lengths, whatever the stars.

const STAR = Symbol("*");

export function isGlob(text) { return /[*?[]/.test(text); }

// A function of a name: whether the glob means it.
export function glob(text) {
  const parts = [...partsOf(text)];
  return (name) => {
    let at = 0, letter = 0, star = -1, mark = 0;
    while (letter < name.length) {
      if (parts[at] === STAR) [star, mark] = [at++, letter];
      else if (parts[at]?.(name[letter])) [at, letter] = [at + 1, letter + 1];
      else if (star >= 0) [at, letter] = [star + 1, ++mark]; // the last star takes one letter more
      else return false;
    }
    while (parts[at] === STAR) at++;
    return at === parts.length;
  };
}

function* partsOf(text) {
  for (let at = 0; at < text.length;) {
    const letter = text[at++], end = letter === "[" ? closing(text, at) : -1;
    if (letter === "*") yield STAR;
    else if (letter === "?") yield () => true;
    else if (end < 0) yield (one) => one === letter;
    else {
      yield among(text.slice(at, end));
      at = end + 1;
    }
  }
}

// Where a bracket ends; -1 where it is a letter like any other. "]" in the first place does not end it.
function closing(text, at) {
  return text.indexOf("]", at + (text[at] === "!") + (text[at + (text[at] === "!")] === "]"));
}

function among(text) {
  const not = text[0] === "!", ranges = [];
  for (let at = Number(not); at < text.length;) {
    const range = text[at + 1] === "-" && at + 2 < text.length;
    ranges.push([text[at], text[range ? at + 2 : at]]);
    at += range ? 3 : 1;
  }
  return (one) => ranges.some(([low, high]) => low <= one && one <= high) !== not;
}
