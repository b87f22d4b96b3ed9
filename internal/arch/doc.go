// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package arch holds no code of the product: its tests check that the imports
// of every package keep the order of the rooms in docs/design/README.md, and
// that what documents name is there.
package arch
