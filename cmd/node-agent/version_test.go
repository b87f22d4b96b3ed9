// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"k8s.io/component-base/version"

	stowageversion "stowage.dev/stowage/internal/version"
)

func TestVersionHasOursBesideThatOfKubernetes(t *testing.T) {
	cmd := newCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--version"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	if want := "node-agent version " + version.Get().GitVersion + "\nStowage " + stowageversion.Release() + "\n"; out.String() != want {
		t.Errorf("printed %q, want %q", out.String(), want)
	}
}
