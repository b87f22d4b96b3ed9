// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"k8s.io/component-base/version"

	stowageversion "stowage.dev/stowage/internal/version"
)

// Scripts read the first line of kube-scheduler --version.
func TestVersionHasOursBesideThatOfKubernetes(t *testing.T) {
	cmd := newCommand()
	t.Cleanup(func() { // the flag is one for the process
		if err := cmd.Flags().Set("version", "false"); err != nil {
			t.Error(err)
		}
	})
	var out bytes.Buffer
	cmd.SetOut(&out)
	if printVersion(cmd) {
		t.Error("printed a version that nobody asked for")
	}
	if err := cmd.ParseFlags([]string{"--version"}); err != nil {
		t.Fatal(err)
	}
	if !printVersion(cmd) {
		t.Error("printed no version")
	}
	if want := "Kubernetes " + version.Get().GitVersion + "\nStowage " + stowageversion.Release() + "\n"; out.String() != want {
		t.Errorf("printed %q, want %q", out.String(), want)
	}
}
