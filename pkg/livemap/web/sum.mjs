// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Writes dist.sum: what the build was made of, and what it is, in the form of sha256sum. A Go test compares.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';

const files = readdirSync('.', { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile())
  .map((entry) => (entry.parentPath + '/' + entry.name).replace(/^\.\//, '').replaceAll('\\', '/'))
  .filter((name) => !name.startsWith('node_modules/') && name !== 'dist.sum')
  .sort();
writeFileSync('dist.sum', files.map((name) => createHash('sha256').update(readFileSync(name)).digest('hex') + '  ' + name + '\n').join(''));
