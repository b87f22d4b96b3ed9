// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useState } from 'preact/hooks';

const themes = ['auto', 'light', 'dark'] as const;
type Theme = (typeof themes)[number];
const kept = 'theme';

function stored(): Theme {
  const theme = localStorage.getItem(kept);
  return themes.find((t) => t === theme) ?? 'auto';
}

/** Light, dark, or as the system is. */
export function ThemeSwitch() {
  const [theme, setTheme] = useState(stored);
  useEffect(() => {
    document.documentElement.dataset['theme'] = theme;
    localStorage.setItem(kept, theme);
  }, [theme]);
  return (
    <fieldset class="theme">
      <legend class="hidden">Colors</legend>
      {themes.map((t) => (
        <label key={t}>
          <input type="radio" name="theme" value={t} checked={t === theme} onChange={() => setTheme(t)} />
          <span>{t}</span>
        </label>
      ))}
    </fieldset>
  );
}
