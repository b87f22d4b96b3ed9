// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// What the server sends. The GPUs are the items of "kubectl stowage gpus -o json".

export const states = ['free', 'held', 'shared', 'partitioned', 'tainted', 'incomplete', 'gone'] as const;
export type State = (typeof states)[number];

export interface Holder {
  namespace: string;
  claim: string;
  pods?: string[];
  device?: string;
  profile?: string;
  share?: Record<string, string>;
  admin?: boolean;
}

export interface Taint {
  key: string;
  value?: string;
  effect: string;
  rule?: string;
  /** The partition that has it, if not all of the GPU has it. */
  partition?: string;
}

export interface GPU {
  node: string;
  driver: string;
  pool: string;
  device: string;
  model?: string;
  memoryBytes?: number;
  state: State;
  holders?: Holder[];
  taints?: Taint[];
  partitions?: Record<string, number>;
  sharedMemoryBytes?: number;
  place: { uuid?: string; pciBusID?: string; pcieRoot?: string; numaNode?: number; nvlinkDomain?: string };
}

/** A pod that asks for devices and does not run yet. */
export interface Waiting {
  namespace: string;
  name: string;
  node?: string;
  scheduler: string;
  priority?: number;
  created: string;
  asks: string[];
  group?: string;
  reason?: string;
  message?: string;
}

/** Version, time in milliseconds since 1970, how many nodes and pods it has changed. */
export type Moment = [version: number, time: number, changes: number];

export interface Change {
  version: number;
  time: number;
  oldest: number;
  full: boolean;
  more: boolean;
  nodes: Record<string, GPU[] | null>;
  pods: Record<string, [Waiting] | null>;
  moments?: Moment[];
}

export interface Title {
  cluster: string;
  file?: boolean;
  taken?: string;
  version: string;
}

export interface Status {
  ready: boolean;
  missing?: { resource: string; reason: string }[];
  unreachable?: string;
  since?: string;
}

export interface Line {
  indent: number;
  text: string;
}
