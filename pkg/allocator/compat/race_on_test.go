// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build race

package compat

const raceDetector = true
