// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { holderText, bytes, memoryOf, stateWords, taintText } from './text';
import type { GPU } from './types';

/** All that is known of a GPU. */
export function GPUDetails({ gpu, brief }: { gpu: GPU; brief?: boolean }) {
  const place = gpu.place;
  const facts: [string, string | undefined][] = [
    ['Model', [gpu.model, bytes(gpu.memoryBytes ?? 0)].filter(Boolean).join(', ')],
    ['NVLink group', place.nvlinkDomain],
    ['NUMA node', place.numaNode?.toString()],
    ['Shared', gpu.sharedMemoryBytes === undefined ? undefined : `${bytes(gpu.sharedMemoryBytes) || '0'} of ${bytes(gpu.memoryBytes ?? 0)}`],
  ];
  if (!brief) {
    facts.push(
      ['Node', gpu.node === '*' ? 'reached over the network' : gpu.node],
      ['Driver', gpu.driver],
      ['Pool', gpu.pool],
      ['UUID', place.uuid],
      ['PCI bus', place.pciBusID],
      ['PCIe root', place.pcieRoot],
      ['Partitions offered', Object.entries(gpu.partitions ?? {}).map(([profile, n]) => `${n} × ${profile}`).join(', ')],
    );
  }
  return (
    <>
      <p class="title">
        <b>{gpu.device}</b> <span class={'state ' + gpu.state}>{gpu.state}</span>
      </p>
      {!brief && <p class="quiet">{stateWords[gpu.state]}</p>}
      {(gpu.holders?.length ?? 0) > 0 && (
        <ul class="holders">
          {gpu.holders!.slice(0, brief ? 8 : undefined).map((holder, i) => (
            <li key={i}>
              {holderText(holder, gpu.driver)}
              {!brief && (
                <span class="quiet">
                  {' '}
                  claim {holder.claim}
                  {holder.device ? ', device ' + holder.device : ''}
                  {Object.entries(holder.share ?? {})
                    .filter(([, value]) => value !== memoryOf(holder, gpu.driver))
                    .map(([name, value]) => `, ${name} ${value}`)
                    .join('')}
                </span>
              )}
            </li>
          ))}
          {brief && gpu.holders!.length > 8 && <li class="quiet">and {gpu.holders!.length - 8} more</li>}
        </ul>
      )}
      {(gpu.taints?.length ?? 0) > 0 && (
        <ul class="taints">
          {gpu.taints!.map((taint, i) => (
            <li key={i}>
              {taintText(taint)}
              {taint.rule && <span class="quiet"> by rule {taint.rule}</span>}
            </li>
          ))}
        </ul>
      )}
      <dl>
        {facts
          .filter(([, value]) => value)
          .map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
      </dl>
    </>
  );
}
