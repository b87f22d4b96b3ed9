// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import type { Change, GPU, State, Waiting } from './types';

const collator = new Intl.Collator('en', { numeric: true });

/** The cluster at one version. */
export class Model {
  version = 0;
  time = 0;
  nodes = new Map<string, GPU[]>();
  pods = new Map<string, Waiting>();
  /** How many GPUs are in each state, and are of each model. */
  states = new Map<State, number>();
  models = new Map<string, number>();
  gpus = 0;
  /** When a GPU changed last, by performance.now(), by its object; only of changes that came one by one. */
  fresh = new WeakMap<GPU, number>();

  private sorted: string[] | null = null;

  clone(): Model {
    const copy = new Model();
    copy.version = this.version;
    copy.time = this.time;
    copy.nodes = new Map(this.nodes);
    copy.pods = new Map(this.pods);
    copy.states = new Map(this.states);
    copy.models = new Map(this.models);
    copy.gpus = this.gpus;
    copy.sorted = this.sorted;
    return copy;
  }

  apply(change: Change): void {
    if (change.full) {
      this.nodes = new Map();
      this.pods = new Map();
      this.states = new Map();
      this.models = new Map();
      this.gpus = 0;
      this.sorted = null;
    }
    const oneByOne = this.version > 0 && !change.full && !change.more;
    for (const [name, gpus] of Object.entries(change.nodes)) {
      const before = this.nodes.get(name);
      before?.forEach((gpu) => this.count(gpu, -1));
      if (gpus === null) {
        if (this.nodes.delete(name)) this.sorted = null;
        continue;
      }
      if (!before) this.sorted = null;
      const old = new Map(before?.map((gpu) => [gpu.driver + '/' + gpu.pool + '/' + gpu.device, JSON.stringify(gpu)]));
      for (const gpu of gpus) {
        this.count(gpu, 1);
        if (oneByOne && old.get(gpu.driver + '/' + gpu.pool + '/' + gpu.device) !== JSON.stringify(gpu)) this.fresh.set(gpu, performance.now());
      }
      this.nodes.set(name, gpus);
    }
    for (const [name, pod] of Object.entries(change.pods)) {
      if (pod === null) this.pods.delete(name);
      else this.pods.set(name, pod[0]);
    }
    if (!change.more) {
      this.version = change.version;
      this.time = change.time;
    }
  }

  /** The names of all nodes, 2 before 10. */
  names(): string[] {
    this.sorted ??= [...this.nodes.keys()].sort(collator.compare);
    return this.sorted;
  }

  private count(gpu: GPU, by: number): void {
    this.gpus += by;
    this.states.set(gpu.state, (this.states.get(gpu.state) ?? 0) + by);
    const model = gpu.model ?? 'unknown model';
    const n = (this.models.get(model) ?? 0) + by;
    if (n > 0) this.models.set(model, n);
    else this.models.delete(model);
  }
}

/** Pods by the time since which they wait, those with a node last. */
export function inOrder(pods: Iterable<Waiting>): Waiting[] {
  return [...pods].sort(
    (a, b) =>
      Number(!!a.node) - Number(!!b.node) ||
      a.created.localeCompare(b.created) ||
      collator.compare(a.namespace + '/' + a.name, b.namespace + '/' + b.name),
  );
}
