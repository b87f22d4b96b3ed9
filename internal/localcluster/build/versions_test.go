// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/mod/modfile"
)

// ownVersions are the modules whose version in the build modules may differ
// from ours, with the reason.
var ownVersions = map[string]string{
	"github.com/opencontainers/cgroups": "what the kubelet manages cgroups with stays as Kubernetes pins it; of our binaries only the node agent has it",
}

// Our binaries and the control plane are built one after the other, and have
// most of their packages in common. With equal versions the second build finds
// them compiled, which is minutes on a new machine; with one that differs near
// the bottom, such as golang.org/x/sys, nearly everything is compiled twice.
func TestTheControlPlaneSharesOurVersions(t *testing.T) {
	ours, err := os.ReadFile(filepath.Join("..", "..", "..", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := fs.ReadFile(kubernetesModule.sources, "go.mod"+inSuffix)
	if err != nil {
		t.Fatal(err)
	}
	want := effectiveVersions(t, "go.mod", ours)
	got := effectiveVersions(t, "kubernetes/go.mod.in", theirs)
	shared := 0
	for path, version := range want {
		other, ok := got[path]
		if !ok || ownVersions[path] != "" {
			continue
		}
		shared++
		if version != other {
			t.Errorf("module %s is %s in our go.mod and %s in kubernetes/go.mod.in: change the lower one and run go generate here", path, version, other)
		}
	}
	if shared < 50 {
		t.Errorf("only %d modules are in both: this check proves nothing", shared)
	}
}

// effectiveVersions are the required versions with replacements applied.
func effectiveVersions(t *testing.T, name string, data []byte) map[string]string {
	t.Helper()
	file, err := modfile.Parse(name, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for _, require := range file.Require {
		versions[require.Mod.Path] = require.Mod.Version
	}
	for _, replace := range file.Replace {
		if _, ok := versions[replace.Old.Path]; ok {
			versions[replace.Old.Path] = replace.New.Version
		}
	}
	return versions
}
