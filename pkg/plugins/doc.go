// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package plugins is every scheduler plugin of this module, ready to be built into a kube-scheduler:
// [NewRegistry] for app.WithPlugin, tests and benchmarks, [Validate] for what a scheduler's configuration must
// look like so that the plugins can keep their promises.
//
// Importing it makes the plugins' typed arguments known to kube-scheduler's configuration loader.
package plugins
