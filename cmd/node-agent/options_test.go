// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo: the other flags for them have no say in it.
func TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo(t *testing.T) {
	for name, tc := range map[string]struct {
		args       []string
		unconfined bool
	}{
		"nothing said": {},
		"other flags":  {args: []string{"--mps-root=/run/mps", "--mps-shm-size=1Gi"}},
		"as it is":     {args: []string{"--mps-sandbox"}},
		"without":      {args: []string{"--mps-sandbox=false"}, unconfined: true},
	} {
		t.Run(name, func(t *testing.T) {
			opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			opts.addRunFlags(flags)
			if err := flags.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			daemons, err := opts.daemons()
			if err != nil || daemons.Unconfined != tc.unconfined {
				t.Errorf("unconfined %t, %v; want %t", daemons.Unconfined, err, tc.unconfined)
			}
		})
	}
}

// TestTheHooksFlagsSayWhoseItIs: one of the host's is named to the check, and nothing is brought along then.
func TestTheHooksFlagsSayWhoseItIs(t *testing.T) {
	for name, tc := range map[string]struct {
		hook hookOptions
		err  string // nothing if it is empty
	}{
		"nvcdi's default":       {},
		"the host's":            {hook: hookOptions{path: "/open/hook"}},
		"the host's before any": {hook: hookOptions{path: "/open/hook", from: "/missing/hook"}},
		"one that is missing":   {hook: hookOptions{from: "/missing/hook"}, err: "--nvidia-cdi-hook-from: nvidia-cdi-hook: could not read Go build info: open /missing/hook"},
	} {
		t.Run(name, func(t *testing.T) {
			opts := &options{hook: tc.hook, host: hostOptions{root: t.TempDir()}, stateDir: "/state", kubeletRoot: "/kubelet"}
			hook, err := opts.installedHook()
			if hook != nil || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("installed: %v, %v, want an error with %q", hook, err, tc.err)
			}
		})
	}
}
