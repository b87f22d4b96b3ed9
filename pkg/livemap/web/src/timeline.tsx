// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { useMemo } from 'preact/hooks';
import type { Store } from './store';
import { age, clockText, count } from './text';
import type { Moment } from './types';

const hour = 3600_000;
const bars = 120;

/** The time that is shown, and when something changed. */
export function Timeline({ store }: { store: Store }) {
  const now = store.now();
  const last = Math.max(now, store.moments.at(-1)?.[1] ?? 0);
  const start = Math.min(Math.max(store.moments[0]?.[1] ?? last, last - hour), last - 1000);
  const at = store.wanted ?? last;
  const second = Math.floor(last / 1000);
  const heights = useMemo(() => histogram(store.moments, start, last), [store.live.version, second]);
  const step = (by: 1 | -1) => {
    const moments = store.moments;
    if (by < 0) {
      const before = moments.findLast(([, time]) => time < (store.past ? store.past.time : Infinity));
      const of = store.past ? before : moments.at(-2);
      if (of) store.seek(of[1]);
      return;
    }
    const after = moments.find(([, time]) => time > store.past!.time);
    store.seek(after && after !== moments.at(-1) ? after[1] : null);
  };
  const label = store.past ? `${clockText(at)}, ${age(last - at)} ago` : 'now';
  return (
    <footer class={store.past ? 'timeline past' : 'timeline'}>
      <button type="button" onClick={() => step(-1)} aria-label="To the change before" disabled={store.moments.length < 2}>
        ◂
      </button>
      <button type="button" onClick={() => step(1)} aria-label="To the change after" disabled={!store.past}>
        ▸
      </button>
      <span class="ends" aria-hidden="true">
        {clockText(start)}
      </span>
      <div class="track">
        <svg viewBox={`0 0 ${bars} 16`} preserveAspectRatio="none" aria-hidden="true">
          {heights.map((height, i) => height > 0 && <rect key={i} x={i} y={16 - height} width={0.8} height={height} />)}
        </svg>
        <input
          type="range"
          aria-label="Time that is shown"
          aria-valuetext={label}
          min={start}
          max={last}
          step={1000}
          value={at}
          onInput={(event) => {
            const value = Number(event.currentTarget.value);
            store.seek(value >= last - 1000 ? null : value);
          }}
        />
      </div>
      <output class="when">
        {store.past ? (
          <>
            <b>{clockText(at)}</b> <span class="quiet">{age(last - at)} ago</span>
          </>
        ) : (
          <span class="quiet">{count(Math.max(0, store.moments.length - 1), 'change')} so far</span>
        )}
      </output>
      <button type="button" class="live" aria-pressed={!store.past} onClick={() => store.seek(null)}>
        Live
      </button>
    </footer>
  );
}

/** How high the bars are, from 0 to 16. */
function histogram(moments: Moment[], start: number, end: number): number[] {
  const sums = new Array<number>(bars).fill(0);
  for (const [, time, changes] of moments.slice(1)) {
    const i = Math.floor(((time - start) / (end - start)) * bars);
    if (i >= 0) sums[Math.min(i, bars - 1)]! += changes;
  }
  const largest = Math.max(1, ...sums);
  return sums.map((n) => (n === 0 ? 0 : 3 + 13 * Math.sqrt(n / largest)));
}
