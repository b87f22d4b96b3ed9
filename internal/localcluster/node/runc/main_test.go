// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheBundleIsThatOfACreateCommand(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{
			name: "create as the shim writes it",
			args: []string{"--root", "/run/containerd/runc/k8s.io", "--log-format", "json", "create", "--bundle", "/b", "--pid-file", "/b/init.pid", "id"},
			want: "/b",
		},
		{name: "another command has no bundle to change", args: []string{"--root", "/r", "start", "id"}},
		{name: "exec has none either", args: []string{"exec", "--process", "/p", "id"}},
		{name: "a flag without its value", args: []string{"create", "--bundle"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := bundleOf(test.args); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestOnlyTheFilterIsRemoved(t *testing.T) {
	for _, test := range []struct{ name, config, want string }{
		{
			name:   "unknown fields and large numbers stay as they are",
			config: `{"ociVersion":"1.2.1","process":{"args":["/probe"]},"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO"},"resources":{"memory":{"limit":9223372036854775807}},"new":{"a":1}}}`,
			want:   `{"ociVersion":"1.2.1","process":{"args":["/probe"]},"linux":{"resources":{"memory":{"limit":9223372036854775807}},"new":{"a":1}}}`,
		},
		{name: "no filter", config: `{"linux":{"resources":{}}}`, want: `{"linux":{"resources":{}}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.json")
			if err := os.WriteFile(path, []byte(test.config), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := removeFilter(path); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(decode(t, []byte(test.want)), decode(t, got)); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
		})
	}
}

// decode keeps numbers as they are written.
func decode(t *testing.T, data []byte) map[string]map[string]json.RawMessage {
	t.Helper()
	var top map[string]json.RawMessage
	if err := json.Unmarshal(data, &top); err != nil {
		t.Fatal(err)
	}
	decoded := map[string]map[string]json.RawMessage{}
	for name, value := range top {
		var inner map[string]json.RawMessage
		if err := json.Unmarshal(value, &inner); err != nil {
			inner = map[string]json.RawMessage{"": value}
		}
		decoded[name] = inner
	}
	return decoded
}
