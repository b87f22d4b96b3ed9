// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/api/v1/resource"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
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

// Who deletes the map deletes nothing that others use.
func TestTheMapsManifestsAreItsOwn(t *testing.T) {
	t.Parallel()
	objects := func(kustomization string) map[string]bool {
		out, err := cluster.Kubectl(t.Context(), "kustomize", filepath.Join(manifests, kustomization))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		names := map[string]bool{}
		for document := range strings.SplitSeq(out, "\n---\n") {
			var object metav1.PartialObjectMetadata
			if err := yaml.Unmarshal([]byte(document), &object); err != nil {
				t.Fatal(err)
			}
			names[object.Kind+" "+object.Namespace+"/"+object.Name] = true
		}
		return names
	}
	its := objects("overlays/map")
	if len(its) < 8 || !its["Namespace /stowage-map"] {
		t.Errorf("the map's: %q", slices.Sorted(maps.Keys(its)))
	}
	for _, others := range []string{"overlays/second-scheduler", "overlays/second-profile", "overlays/simulated", "base/access", "ownership", "numa", "kubectl"} {
		for name := range objects(others) {
			if its[name] {
				t.Errorf("%s has %s, too", others, name)
			}
		}
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

// Each workload has a NetworkPolicy that selects its pods and no others, and lets nobody in but to its port, from namespaces that an administrator labels.
func TestNetworkPoliciesAreAboutOurPods(t *testing.T) {
	t.Parallel()
	out, err := cluster.Kubectl(t.Context(), "kustomize", filepath.Join(manifests, "overlays/second-scheduler"))
	if err != nil {
		t.Fatal(err)
	}
	templates, policies := map[string]v1.PodTemplateSpec{}, map[string]networkingv1.NetworkPolicy{}
	for document := range strings.SplitSeq(out, "\n---\n") {
		var object struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Spec              struct {
				Template v1.PodTemplateSpec `json:"template"`
			} `json:"spec"`
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatal(err)
		}
		switch name := object.Namespace + "/" + object.Name; object.Kind {
		case "Deployment", "DaemonSet":
			templates[name] = object.Spec.Template
		case "NetworkPolicy":
			var policy networkingv1.NetworkPolicy
			if err := yaml.UnmarshalStrict([]byte(document), &policy); err != nil {
				t.Fatal(err)
			}
			policies[name] = policy
		}
	}
	if len(templates) != 2 || len(policies) != len(templates) {
		t.Fatalf("%d workloads, %d policies, want 2 and as many", len(templates), len(policies))
	}
	for name, policy := range policies {
		selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
		if err != nil {
			t.Fatal(err)
		}
		for other, template := range templates {
			if got := selector.Matches(labels.Set(template.Labels)); got != (other == name) {
				t.Errorf("policy %s selects the pods of %s: %t", name, other, got)
			}
		}
		var ports, open []string
		for _, container := range templates[name].Spec.Containers {
			for _, port := range container.Ports {
				ports = append(ports, port.Name)
			}
		}
		for _, rule := range policy.Spec.Ingress {
			for _, port := range rule.Ports {
				open = append(open, port.Port.String())
			}
			want := []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"stowage.dev/reads-metrics": "true"}}}}
			if diff := cmp.Diff(want, rule.From); diff != "" {
				t.Errorf("policy %s: who is let in (-want +got):\n%s", name, diff)
			}
		}
		if !slices.Equal(policy.Spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) || len(open) == 0 || !slices.Equal(open, ports) {
			t.Errorf("policy %s: types %v, open ports %q, the container's are %q", name, policy.Spec.PolicyTypes, open, ports)
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

// workload is what a kustomization runs in a namespace.
type workload struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Template v1.PodTemplateSpec `json:"template"`
	} `json:"spec"`
}

// workloads are those of all overlays, as the real kubectl makes them, by overlay and kind.
func workloads(t *testing.T) map[string]workload {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(manifests, "overlays", "*"))
	if err != nil || len(dirs) < 4 {
		t.Fatalf("overlays: %q, %v", dirs, err)
	}
	all := map[string]workload{}
	for _, dir := range dirs {
		out, err := cluster.Kubectl(t.Context(), "kustomize", dir)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for document := range strings.SplitSeq(out, "\n---\n") {
			var w workload
			if err := yaml.Unmarshal([]byte(document), &w); err != nil {
				t.Fatal(err)
			}
			if len(w.Spec.Template.Spec.Containers) > 0 {
				all[filepath.Base(dir)+" "+w.Kind] = w
			}
		}
	}
	if len(all) != 2*len(dirs)-1 { // the map's has a Deployment alone
		t.Fatalf("workloads of %q: %v", dirs, slices.Collect(maps.Keys(all)))
	}
	return all
}

// The pods of each manifest are let into the namespace that they go to, and into none that allows more than they need.
func TestOnlyTheAgentsNamespaceIsPrivileged(t *testing.T) {
	t.Parallel()
	admit := func(w workload, namespace string) error {
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: w.Name + "-", Labels: w.Spec.Template.Labels}, Spec: w.Spec.Template.Spec}
		_, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	for name, w := range workloads(t) {
		if err := admit(w, w.Namespace); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if w.Kind == "DaemonSet" {
			w.Spec.Template.Spec.ServiceAccountName = ""
			checkRefused(t, admit(w, "stowage-system"), `violates PodSecurity "restricted:latest"`)
		}
	}
	namespaces, err := cluster.AdminClient().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=stowage"})
	if err != nil {
		t.Fatal(err)
	}
	levels := map[string]string{}
	for _, namespace := range namespaces.Items {
		levels[namespace.Name] = namespace.Labels["pod-security.kubernetes.io/enforce"]
	}
	if want := map[string]string{"stowage-system": "restricted", "stowage-node-agent": "privileged"}; !maps.Equal(levels, want) {
		t.Errorf("namespaces: %v, want %v", levels, want)
	}
}

// Go keeps its memory below the container's limit, with the values that the kubelet makes of the manifests, also where an overlay changes the limit.
func TestGoKnowsTheMemoryLimit(t *testing.T) {
	t.Parallel()
	for name, w := range workloads(t) {
		for _, limit := range []string{"", "100Mi", "1500M", "64Gi"} {
			container := &w.Spec.Template.Spec.Containers[0]
			if limit != "" {
				container.Resources.Limits[v1.ResourceMemory] = apiresource.MustParse(limit)
			}
			values := map[string]string{}
			for _, env := range container.Env {
				value := expansion.Expand(env.Value, expansion.MappingFuncFor(values))
				if from := env.ValueFrom; from != nil && from.ResourceFieldRef != nil {
					var err error
					if value, err = resource.ExtractContainerResourceValue(from.ResourceFieldRef, container); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
				}
				values[env.Name] = value
			}
			got, err := strconv.ParseInt(values["GOMEMLIMIT"], 10, 64)
			memory := container.Resources.Limits.Memory().Value()
			if err != nil || got > memory*97/100 || got < memory*95/100 {
				t.Errorf("%s: GOMEMLIMIT=%s of a limit of %d (%s), %v", name, values["GOMEMLIMIT"], memory, limit, err)
			}
			if request := container.Resources.Requests.Memory().Value(); limit == "" && (request == 0 || request > memory) {
				t.Errorf("%s: %d bytes are requested of %d", name, request, memory)
			}
		}
	}
}
