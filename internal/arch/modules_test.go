// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"
)

// fixedIn is from which version on a module is without what is publicly known against it. It is for machines that reach no database of
// vulnerabilities, see make vulncheck, and is no substitute: what nobody enters here is not in it.
var fixedIn = map[string]struct{ version, what string }{
	"github.com/NVIDIA/nvidia-container-toolkit": {"v1.17.8", "CVE-2025-23266"},
	"github.com/klauspost/compress":              {"v1.20.2", "GO-2026-6865"},
	"go.etcd.io/etcd/client/pkg/v3":              {"v3.7.1", "GO-2026-6107"},
	"go.opentelemetry.io/otel/sdk":               {"v1.45.0", "CVE-2026-39883, GO-2026-6505"},
	"golang.org/x/crypto":                        {"v0.56.0", "GO-2026-6354, GO-2026-6355"},
	"golang.org/x/net":                           {"v0.60.0", "GO-2026-5942, GO-2026-6603, -6610, -6611, -6612, -6617"},
	"golang.org/x/oauth2":                        {"v0.27.0", "CVE-2025-22868"},
	"golang.org/x/sys":                           {"v0.44.0", "GO-2026-5024"},
	"golang.org/x/text":                          {"v0.39.0", "GO-2026-5970"},
	"google.golang.org/grpc":                     {"v1.83.2", "CVE-2026-84304, CVE-2026-84445"},
	"google.golang.org/protobuf":                 {"v1.33.0", "CVE-2024-24786"},
}

// The modules that we and our tools are built from have the fixes that the table knows of. go.mod has all of them, the indirect ones, too.
func TestModulesHaveTheirFixes(t *testing.T) {
	used := map[string]bool{}
	for _, name := range []string{"go.mod", "tools/go.mod"} {
		content, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		file, err := modfile.Parse(name, content, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, require := range file.Require {
			path, version := require.Mod.Path, require.Mod.Version
			used[path] = true
			if fix, known := fixedIn[path]; known && semver.Compare(version, fix.version) < 0 {
				t.Errorf("%s: %s %s has %s: go get %s@%s, or later", name, path, version, fix.what, path, fix.version)
			}
		}
	}
	for path := range fixedIn {
		if !used[path] {
			t.Errorf("%s is in the table, and nothing is built from it", path)
		}
	}
}
