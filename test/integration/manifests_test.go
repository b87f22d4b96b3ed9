package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// Where the tokens of agent and scheduler go is not up to the nodes: no kubelet can give its node the labels that the pods follow.
func TestNoNodeBringsAPodOfOursToItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	kubelet := w.kubelet("a")
	label := func(key string) error {
		patch := `{"metadata":{"labels":{"` + key + `":"true"}}}`
		_, err := kubelet.CoreV1().Nodes().Patch(w.ctx, w.nodeName("a"), types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	if err := label("nvidia.com/gpu.present"); err != nil {
		t.Errorf("a label that kubelets may set: %v", err)
	}
	var agent appsv1.DaemonSet
	var scheduler appsv1.Deployment
	for file, object := range map[string]any{"node-agent/daemonset.yaml": &agent, "scheduler/deployment.yaml": &scheduler} {
		data, err := os.ReadFile(filepath.Join(manifests, "base", file))
		w.must(err, "reading the manifest")
		w.must(yaml.UnmarshalStrict(data, object), "reading %s", file)
	}
	var keys []string
	for key := range agent.Spec.Template.Spec.NodeSelector {
		keys = append(keys, key)
	}
	if len(keys) != 1 {
		t.Fatalf("the agent follows the labels %q", keys)
	}
	affinity := scheduler.Spec.Template.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		t.Fatal("the scheduler runs anywhere")
	}
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, expression := range term.MatchExpressions {
			keys = append(keys, expression.Key)
		}
	}
	if len(keys) != 2 {
		t.Fatalf("agent and scheduler follow the labels %q", keys)
	}
	for _, key := range keys {
		checkRefused(t, label(key), "is not allowed to modify labels")
	}
}
