// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import type { GPU, Holder, State, Taint } from './types';

export const stateWords: Record<State, string> = {
  free: 'claims can have it',
  held: 'a claim has all of it',
  shared: 'claims have shares of it',
  partitioned: 'claims have partitions of it',
  tainted: 'nobody has it, and a taint keeps claims off',
  incomplete: 'nobody has it, and claims cannot have it: not all slices of its pool are there',
  gone: 'a claim has it, and it is not published any more',
};

/** "80Gi", as kubectl stowage gpus has it. */
export function bytes(n: number): string {
  const gi = 2 ** 30;
  if (n === 0) return '';
  if (n >= 10 * gi) return Math.floor((n + gi / 2) / gi) + 'Gi';
  if (n >= gi) return (n / gi).toFixed(1).replace(/\.0$/, '') + 'Gi';
  if (n % 2 ** 20 === 0) return n / 2 ** 20 + 'Mi';
  return String(n);
}

const suffixes: Record<string, number> = {
  '': 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40, Pi: 2 ** 50,
};

/** The value of a quantity of Kubernetes; NaN of one in another form. */
export function quantity(text: string): number {
  const match = /^([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)$/.exec(text);
  return Number(match?.[1]) * (suffixes[match?.[2] ?? ''] ?? NaN);
}

export function memoryOf(holder: Holder, driver: string): string | undefined {
  return holder.share?.['memory'] ?? holder.share?.[driver + '/memory'];
}

/** "team-a/train (1g.10gb)" */
export function holderText(holder: Holder, driver: string): string {
  const who = holder.pods?.length
    ? holder.namespace + '/' + holder.pods.join(',')
    : 'claim ' + holder.namespace + '/' + holder.claim;
  if (holder.admin) return who + ' (admin)';
  const part = holder.profile ?? memoryOf(holder, driver);
  return part ? `${who} (${part})` : who;
}

export function taintText(taint: Taint): string {
  return taint.key + (taint.value ? '=' + taint.value : '') + ':' + taint.effect + (taint.partition ? ' on ' + taint.partition : '');
}

/** A GPU in one sentence, for those who do not see it. */
export function describe(gpu: GPU): string {
  const parts = [gpu.device, gpu.state];
  const model = [gpu.model, bytes(gpu.memoryBytes ?? 0)].filter(Boolean).join(' ');
  if (model) parts.push(model);
  if (gpu.holders?.length) parts.push('held by ' + gpu.holders.map((h) => holderText(h, gpu.driver)).join(' and '));
  if (gpu.taints?.length) parts.push('taints ' + gpu.taints.map(taintText).join(' and '));
  if (gpu.place.nvlinkDomain) parts.push('NVLink group ' + gpu.place.nvlinkDomain);
  return parts.join(', ');
}

/** "3 min", the time between two moments in milliseconds. */
export function age(ms: number): string {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 120) return s + ' s';
  if (s < 2 * 3600) return Math.floor(s / 60) + ' min';
  if (s < 48 * 3600) return Math.floor(s / 3600) + ' h';
  return Math.floor(s / 86400) + ' d';
}

const clock = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false });

export function clockText(ms: number): string {
  return clock.format(ms);
}

const numbers = new Intl.NumberFormat('en');

export function number(n: number): string {
  return numbers.format(n);
}

export function count(n: number, what: string): string {
  return number(n) + ' ' + what + (n === 1 ? '' : 's');
}
