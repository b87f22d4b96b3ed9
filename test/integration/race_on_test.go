// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build race

package integration

const raceDetector = true
