// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package maptest holds the tests of "kubectl stowage map" in a real browser: the built command, a real API server, and Chromium.
package maptest
