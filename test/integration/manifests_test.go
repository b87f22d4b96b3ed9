package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// Every kustomization is built by the real kubectl and accepted by the real API server, with no field that it does
// not know.
func TestKustomizationsAreAccepted(t *testing.T) {
	t.Parallel()
	found := 0
	err := filepath.WalkDir(manifests, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Name() != "kustomization.yaml" {
			return err
		}
		found++
		dir := filepath.Dir(path)
		t.Run(strings.TrimPrefix(dir, manifests+"/"), func(t *testing.T) {
			t.Parallel()
			if out, err := cluster.Kubectl(t.Context(), "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k", dir); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 5 {
		t.Errorf("found only %d kustomizations in %s", found, manifests)
	}
}

// The files are also used one by one.
func TestExamplesAreAccepted(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(manifests, "examples", "*.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("examples: %q, %v", files, err)
	}
	listed, err := os.ReadFile(filepath.Join(manifests, "examples", "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		if name == "kustomization.yaml" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !strings.Contains(string(listed), "- "+name+"\n") {
				t.Errorf("%s is not listed in the kustomization of the examples", name)
			}
			if out, err := cluster.Kubectl(t.Context(), "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", file); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// The ConfigMap holds the very files that the other tests run.
func TestConfigMapHasTheConfigurationFiles(t *testing.T) {
	t.Parallel()
	out, err := cluster.Kubectl(t.Context(), "kustomize", filepath.Join(manifests, "scheduler-config"))
	if err != nil {
		t.Fatal(err)
	}
	var configMap v1.ConfigMap
	if err := yaml.UnmarshalStrict([]byte(out), &configMap); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{secondScheduler, numaConfig, secondProfile} {
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := configMap.Data[filepath.Base(file)]; got != string(want) {
			t.Errorf("the ConfigMap has for %s:\n%s", file, got)
		}
	}
}
