// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

import { defineConfig } from 'vite';

// Names without hashes: the server tells browsers to keep nothing, and a build differs from the last one where the page does.
export default defineConfig({
  base: './',
  publicDir: 'public',
  build: {
    target: 'es2023',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0, // the page's policy allows no data: URLs
    rolldownOptions: {
      output: { entryFileNames: 'map.js', chunkFileNames: '[name].js', assetFileNames: 'map[extname]' },
    },
  },
});
