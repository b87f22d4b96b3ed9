// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { taintText } from './text';
import type { GPU, State } from './types';

/** Which GPUs are looked for. */
export interface Filter {
  text: string;
  states: ReadonlySet<State>;
  model: string;
}

export const everything: Filter = { text: '', states: new Set(), model: '' };

interface Words {
  node: string;
  pod: string;
  model: string;
  state: string;
  other: string;
}

const words = new WeakMap<GPU, Words>();

function wordsOf(gpu: GPU): Words {
  let w = words.get(gpu);
  if (!w) {
    const pods = (gpu.holders ?? []).flatMap((h) => [
      ...(h.pods ?? []).map((pod) => h.namespace + '/' + pod),
      h.namespace + '/' + h.claim,
      h.profile ?? '',
    ]);
    const other = [gpu.device, gpu.driver, gpu.place.uuid, gpu.place.nvlinkDomain, ...(gpu.taints ?? []).map(taintText)];
    w = {
      node: gpu.node.toLowerCase(),
      pod: pods.join('\n').toLowerCase(),
      model: (gpu.model ?? '').toLowerCase(),
      state: gpu.state,
      other: other.join('\n').toLowerCase(),
    };
    words.set(gpu, w);
  }
  return w;
}

/** Returns a function that tells whether a GPU is looked for, or null if all are. Words are all to be found; "node:", "pod:", "model:" and "state:" say where. */
export function matcher(filter: Filter): ((gpu: GPU) => boolean) | null {
  const tests: ((gpu: GPU) => boolean)[] = [];
  if (filter.states.size > 0) tests.push((gpu) => filter.states.has(gpu.state));
  if (filter.model) tests.push((gpu) => (gpu.model ?? 'unknown model') === filter.model);
  for (const word of filter.text.toLowerCase().split(/\s+/).filter(Boolean)) {
    const [, field, value] = /^(node|pod|model|state):(.*)$/.exec(word) ?? [];
    if (field && value !== undefined) tests.push((gpu) => wordsOf(gpu)[field as keyof Words].includes(value));
    else tests.push((gpu) => Object.values(wordsOf(gpu)).some((text) => text.includes(word)));
  }
  return tests.length === 0 ? null : (gpu) => tests.every((test) => test(gpu));
}

export function isEverything(filter: Filter): boolean {
  return filter.text.trim() === '' && filter.states.size === 0 && filter.model === '';
}
