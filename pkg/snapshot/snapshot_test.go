// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"bytes"
	"compress/gzip"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1"
	groupapi "k8s.io/api/scheduling/v1beta1"
	storageapi "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/snapshot"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

func small() *snapshottest.Cluster {
	c := snapshottest.New(2, 2)
	c.Run("team-a", "train", 0, 0, 1)
	c.Pod("team-b", "late", 2, 5)
	return c
}

func written(t *testing.T, s *snapshot.Snapshot) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := s.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func gzipped(t *testing.T, content []byte) []byte {
	t.Helper()
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return packed.Bytes()
}

// What was written is read again as it was, as JSON, YAML, or packed, and written again it is the same bytes.
func TestWhatIsWrittenIsRead(t *testing.T) {
	first := written(t, small().Snapshot())
	inYAML, err := yaml.JSONToYAML(first)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"JSON": first, "YAML": inYAML, "packed": gzipped(t, first)} {
		s, err := snapshot.Read(bytes.NewReader(content))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(s.Pods) != 2 || len(s.ResourceSlices) != 2 {
			t.Errorf("%s: %d pods, %d slices", name, len(s.Pods), len(s.ResourceSlices))
		}
		if diff := cmp.Diff(string(first), string(written(t, s))); diff != "" {
			t.Errorf("%s: written again it differs: %s", name, diff)
		}
	}
}

// What is wrong in a file is named.
func TestWhatIsWrongIsNamed(t *testing.T) {
	const head = `{"apiVersion":"stowage.dev/v1alpha1","kind":"ClusterSnapshot"`
	packed := string(gzipped(t, written(t, small().Snapshot())))
	for name, tc := range map[string]struct{ content, want string }{
		"empty":             {"", "it is empty"},
		"another version":   {`{"apiVersion":"stowage.dev/v9","kind":"ClusterSnapshot"}`, `apiVersion "stowage.dev/v9"`},
		"another kind":      {`{"apiVersion":"v1","kind":"List"}`, `kind "List"`},
		"an unknown field":  {head + `,"nods":[]}`, `unknown field "nods"`},
		"a list is none":    {head + `,"nodes":{}}`, `nodes: want a list`},
		"it ends early":     {head + `,"nodes":[{"metadata":{"name":"a"}}`, "it ends too early"},
		"no comma":          {head + `,"nodes":[{"metadata":{"name":"a"}} {}]}`, "nodes: want a comma"},
		"no letter":         {head + `,"nodes":[{"metadata":{"name":"a"}}` + "\xc3]}", `nodes: want a comma, have "\xc3"`},
		"a comma too many":  {head + `,"nodes":[,{}]}`, "nodes: a value is missing"},
		"a field twice":     {head + `,"nodes":[],"nodes":[]}`, "nodes: duplicate field"},
		"something follows": {head + `} {}`, "something follows its end"},
		"an object is none": {head + `,"nodes":[1]}`, "nodes[0] (its name is not legible): a JSON number, want v1.Node"},
		"brackets differ":   {head + `,"nodes":[{"metadata":{"name":"a"]}]}`, "nodes[0]"},
		"a field's type":    {head + `,"pods":[{"metadata":{"name":"a","namespace":"n","uid":"u"},"spec":{"priority":"high"}}]}`, "pods[0] (n/a): spec.priority: a JSON string, want int32"},
		"quotes":            {head + `,"nodes":[{"metadata":{"name":"\"a\\"}},{"metadata":{"name":"\\\\\"b]"}},{"spec":{}}]}`, "nodes[2]: metadata.name: Required value"},
		"a string is open":  {head + `,"nodes":[{"metadata":{"name":"a\\\"}}]}`, "it ends too early"},
		"a null":            {head + `,"nodes":[null]}`, "nodes[0]: metadata.name: Required value"},
		"no UID":            {head + `,"pods":[{"metadata":{"name":"a","namespace":"n"}}]}`, "pods n/a: metadata.uid: Required value"},
		"two of one name": {
			head + `,"nodes":[{"metadata":{"name":"a"}},{"metadata":{"name":"a"}}]}`,
			"nodes a: there are two of that name",
		},
		"two of one UID": {
			head + `,"pods":[{"metadata":{"name":"a","uid":"u"}},{"metadata":{"name":"b","uid":"u"}}]}`,
			`Duplicate value: "u" is that of a`,
		},
		"a quantity": {
			head + `,"nodes":[{"metadata":{"name":"a"},"status":{"allocatable":{"cpu":"many"}}}]}`,
			"nodes[0] (a): status.allocatable.cpu: quantities must match",
		},
		"a null of the installation": {head + `,"installation":{"deployments":[{},null]}}`, "installation: deployments[1]: is null"},
		"packed, and wrong":          {"\x1f\x8b\x00", "unpack"},
		"packed, and cut off":        {packed[:len(packed)-20], "unexpected EOF"},
	} {
		if _, err := snapshot.Read(strings.NewReader(tc.content)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}

// namesElsewhere gives names where they stand in fields of their own, and names of nodes that are gone.
// It returns the UID of a claim for such a node.
func namesElsewhere(c *snapshottest.Cluster, pod *v1.Pod) types.UID {
	source := &v1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "secret-source"}
	pod.Spec.NodeSelector = map[string]string{v1.LabelHostname: "secret-node"}
	pod.Spec.Volumes = []v1.Volume{{Name: "secret-data", VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{
		VolumeClaimTemplate: &v1.PersistentVolumeClaimTemplate{Spec: v1.PersistentVolumeClaimSpec{DataSource: source}},
	}}}}
	pod.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{
		ResourceClaimName: "secret-claim", RequestMappings: []v1.ContainerExtendedResourceRequest{{ContainerName: "secret-container", RequestName: "r"}},
	}
	_, gone := c.Run("team-a", "gone", 0, 0, 0)
	gone.Status.Allocation.NodeSelector.NodeSelectorTerms[0].MatchFields[0].Values = []string{"secret-node"}
	gone.Status.Allocation.Devices.Results[0].Pool = "secret-node"
	c.PersistentVolumeClaims = []*v1.PersistentVolumeClaim{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "secret-pvc", Annotations: map[string]string{"volume.kubernetes.io/selected-node": "secret-node"}},
		Spec:       v1.PersistentVolumeClaimSpec{DataSource: source, DataSourceRef: &v1.TypedObjectReference{Kind: "VolumeSnapshot", Name: "secret-source"}},
	}}
	c.PersistentVolumes[0].Spec = v1.PersistentVolumeSpec{
		PersistentVolumeSource: v1.PersistentVolumeSource{Cinder: &v1.CinderPersistentVolumeSource{SecretRef: &v1.SecretReference{Name: "secret-login"}}},
		NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
			MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{"secret-node"}}},
		}}}},
	}
	c.PriorityClasses = []*schedulingapi.PriorityClass{{ObjectMeta: metav1.ObjectMeta{Name: "high"}, Description: "secret-reason"}}
	c.PodGroups = []*groupapi.PodGroup{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "secret-group", UID: "group"},
		Spec:       groupapi.PodGroupSpec{WorkloadRef: &groupapi.WorkloadReference{WorkloadName: "secret-work", TemplateName: "secret-part"}},
	}}
	return gone.UID
}

// No name that a user gave is left, wherever it stood, and what refers to an object still does.
func TestHashedNames(t *testing.T) {
	c := small()
	pod := c.Pods[0]
	pod.Labels = map[string]string{"project": "secret-label"}
	pod.Spec.Affinity = &v1.Affinity{PodAffinity: &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{
		Namespaces: []string{"team-a"}, TopologyKey: v1.LabelHostname,
		NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: v1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: []string{"team-a"}},
			{Key: "app.kubernetes.io/instance", Operator: metav1.LabelSelectorOpIn, Values: []string{"secret-instance"}},
		}},
	}}}}
	pod.Labels["app.kubernetes.io/instance"] = "secret-instance"
	pod.Spec.Containers[0].Name = "secret-container"
	c.Namespaces = []*v1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}, {ObjectMeta: metav1.ObjectMeta{Name: "team-a"}}}
	c.PodDisruptionBudgets = []*policyapi.PodDisruptionBudget{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "worker-0", Name: "secret-budget"},
		Status:     policyapi.PodDisruptionBudgetStatus{DisruptedPods: map[string]metav1.Time{"secret-pod": snapshottest.Now}},
	}}
	c.PersistentVolumes = []*v1.PersistentVolume{{ObjectMeta: metav1.ObjectMeta{
		Name: "secret-volume", Labels: map[string]string{"project": "secret-label", v1.LabelTopologyZone: "zone-a"},
	}}}
	pool := c.ResourceSlices[0].DeepCopy()
	pool.Name, pool.UID, pool.Spec.Pool.Name = "worker-0-fabric", "fabric", "worker-0-fabric"
	c.ResourceSlices = append(c.ResourceSlices, pool)
	gone := namesElsewhere(c, pod)
	whole := c.Snapshot()
	whole.Missing = []snapshot.Missing{
		{Resource: "namespaces", Reason: "forbidden"}, {Resource: "/metrics of kubelets", Reason: "node worker-0: dial tcp secret-address:10250: i/o timeout"},
	}
	hashed, err := whole.Hash()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]snapshot.Missing{{Resource: "namespaces", Reason: "forbidden"}, {Resource: "/metrics of kubelets", Reason: "no answer"}}, hashed.Missing); diff != "" {
		t.Error(diff)
	}
	text := string(written(t, hashed))
	for _, name := range []string{"worker-0", "worker-1", "team-a", "team-b", "train", `"late"`, "secret-"} {
		if strings.Contains(text, name) {
			t.Errorf("%q is left", name)
		}
	}
	nodes := map[string]bool{}
	for _, node := range hashed.Nodes {
		nodes[node.Name] = true
	}
	hidden := hashed.Pods[slices.IndexFunc(hashed.Pods, func(p *v1.Pod) bool { return p.UID == pod.UID })] // the order is another one
	if label := hashed.PersistentVolumes[0].Labels; label["project"] != hidden.Labels["project"] || label[v1.LabelTopologyZone] != "zone-a" {
		t.Errorf("labels of the volume %v, of the pod %v", label, hidden.Labels)
	}
	term := hidden.Spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0]
	if ns := term.NamespaceSelector.MatchExpressions[0].Values[0]; ns != hidden.Namespace || term.Namespaces[0] != ns {
		t.Errorf("the affinity is to pods of %v and %s, not of %s", term.Namespaces, ns, hidden.Namespace)
	}
	if budget := hashed.PodDisruptionBudgets[0]; !slices.ContainsFunc(hashed.Namespaces, func(n *v1.Namespace) bool { return n.Name == budget.Namespace }) {
		t.Errorf("there is no namespace %s, which has the name of a node", budget.Namespace)
	}
	for _, slice := range hashed.ResourceSlices {
		if slice.UID == "fabric" {
			continue
		}
		if !nodes[*slice.Spec.NodeName] || slice.Spec.Pool.Name != *slice.Spec.NodeName {
			t.Errorf("slice of node %s, pool %s", *slice.Spec.NodeName, slice.Spec.Pool.Name)
		}
	}
	for _, claim := range hashed.ResourceClaims {
		if claim.UID == gone {
			continue
		}
		if a := claim.Status.Allocation; a != nil && (!nodes[a.NodeSelector.NodeSelectorTerms[0].MatchFields[0].Values[0]] ||
			!nodes[a.Devices.Results[0].Pool]) {
			t.Errorf("allocation %v", a)
		}
	}
	for _, pod := range hashed.Pods {
		found := false
		for _, claim := range hashed.ResourceClaims {
			found = found || claim.Name == *pod.Spec.ResourceClaims[0].ResourceClaimName && claim.Namespace == pod.Namespace
		}
		if !found {
			t.Errorf("pod %s has no claim", pod.Name)
		}
	}
}

// What selects nodes selects the same ones with hashed names, whatever the labels and attributes are called.
func TestHashedNamesSelectTheSameNodes(t *testing.T) {
	c := snapshottest.New(2, 1)
	node := c.Nodes[0]
	maps.Copy(node.Labels, map[string]string{"environment": "prod", "message": "m", "description": "d", "pool": "p", "hostname": "h"})
	on := &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{node.Name}}},
		MatchFields:      []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{node.Name}}},
	}}}
	one, _ := c.Pod("team-a", "train", 1, 0)
	one.Spec.NodeSelector = maps.Clone(node.Labels)
	one.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution:  on,
		PreferredDuringSchedulingIgnoredDuringExecution: []v1.PreferredSchedulingTerm{{Weight: 1, Preference: on.NodeSelectorTerms[0]}},
	}}
	one.Spec.HostnameOverride = ptr.To("secret-host")
	one.Status.NodeAllocatableResourceClaimStatuses = []v1.NodeAllocatableResourceClaimStatus{{Containers: []string{"main"}}}
	c.PersistentVolumes = []*v1.PersistentVolume{{
		ObjectMeta: metav1.ObjectMeta{Name: "disk"}, Spec: v1.PersistentVolumeSpec{NodeAffinity: &v1.VolumeNodeAffinity{Required: on}},
	}}
	c.StorageClasses = []*storageapi.StorageClass{{ObjectMeta: metav1.ObjectMeta{Name: "local"}, AllowedTopologies: []v1.TopologySelectorTerm{{
		MatchLabelExpressions: []v1.TopologySelectorLabelRequirement{{Key: v1.LabelHostname, Values: []string{node.Name}}},
	}}}}
	c.ResourceSlices[0].Spec.NodeName, c.ResourceSlices[0].Spec.NodeSelector = nil, on
	attributes := c.ResourceSlices[0].Spec.Devices[0].Attributes
	for _, name := range []resourceapi.QualifiedName{"environment", "message", "pool"} {
		attributes[name] = resourceapi.DeviceAttribute{StringValue: ptr.To("a")}
	}
	one.Spec.Volumes = []v1.Volume{{Name: "scratch", VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{}}}}
	c.PersistentVolumeClaims = []*v1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "train-scratch"}}}
	c.PersistentVolumes[0].Spec.ClaimRef = &v1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "team-a", Name: "train-scratch"}
	hashed, err := c.Snapshot().Hash()
	if err != nil {
		t.Fatal(err)
	}
	var there *v1.Node
	for _, n := range hashed.Nodes {
		if n.UID == node.UID {
			there = n
		}
	}
	got := hashed.Pods[0]
	if diff := cmp.Diff(there.Labels, got.Spec.NodeSelector); diff != "" {
		t.Error("node selector: ", diff)
	}
	affinity := got.Spec.Affinity.NodeAffinity
	published := hashed.ResourceSlices[slices.IndexFunc(hashed.ResourceSlices, func(s *resourceapi.ResourceSlice) bool { return s.Spec.NodeSelector != nil })]
	for name, term := range map[string]v1.NodeSelectorTerm{
		"required":  affinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0],
		"preferred": affinity.PreferredDuringSchedulingIgnoredDuringExecution[0].Preference,
		"volume":    hashed.PersistentVolumes[0].Spec.NodeAffinity.Required.NodeSelectorTerms[0],
		"slice":     published.Spec.NodeSelector.NodeSelectorTerms[0],
	} {
		if host, field := term.MatchExpressions[0].Values[0], term.MatchFields[0].Values[0]; host != there.Name || field != there.Name {
			t.Errorf("%s: for %s and %s, not %s", name, host, field, there.Name)
		}
	}
	if in := hashed.StorageClasses[0].AllowedTopologies[0].MatchLabelExpressions[0].Values[0]; in != there.Name {
		t.Errorf("storage class: for %s, not %s", in, there.Name)
	}
	if of := got.Status.NodeAllocatableResourceClaimStatuses[0].Containers[0]; of != got.Spec.Containers[0].Name {
		t.Errorf("status of container %s, not %s", of, got.Spec.Containers[0].Name)
	}
	scratch := got.Name + "-" + got.Spec.Volumes[0].Name
	if name, bound := hashed.PersistentVolumeClaims[0].Name, hashed.PersistentVolumes[0].Spec.ClaimRef.Name; name != scratch || bound != scratch {
		t.Errorf("claims %s and %s of an ephemeral volume, want %s", name, bound, scratch)
	}
	if *got.Spec.HostnameOverride == "secret-host" {
		t.Error("the host's name is left")
	}
	if diff := cmp.Diff(attributes, published.Spec.Devices[0].Attributes); diff != "" {
		t.Error("attributes: ", diff)
	}
}

// A snapshot of a cluster has no secret, notes what could not be listed, and fails where it could not do without.
func TestTake(t *testing.T) {
	c := small()
	c.Pods[0].Spec.Containers[0].Env = []v1.EnvVar{{Name: "TOKEN", Value: "hidden"}}
	c.Pods[0].Spec.Containers[0].Args = []string{"--password=hidden"}
	c.Pods[0].Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "hidden"}
	c.Nodes[0].Spec.ProviderID = "cloud://hidden"
	c.CSINodes = []*storageapi.CSINode{{
		ObjectMeta: metav1.ObjectMeta{Name: "worker-0"},
		Spec:       storageapi.CSINodeSpec{Drivers: []storageapi.CSINodeDriver{{Name: "disk", NodeID: "hidden"}}},
	}}
	c.PersistentVolumes = []*v1.PersistentVolume{{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: v1.PersistentVolumeSpec{
		PersistentVolumeSource: v1.PersistentVolumeSource{NFS: &v1.NFSVolumeSource{Server: "hidden", Path: "/hidden"}},
	}}}
	c.ResourceClaimTemplates = []*resourceapi.ResourceClaimTemplate{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "t"},
		Spec:       resourceapi.ResourceClaimTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"a": "hidden"}}},
	}}
	c.Pods[0].Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{
		VolumeClaimTemplate: &v1.PersistentVolumeClaimTemplate{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"a": "hidden"}}},
	}}}}
	client := func(forbidden string) *fake.Clientset {
		var objects []runtime.Object
		for object := range c.All() {
			objects = append(objects, object)
		}
		client := fake.NewSimpleClientset(objects...)
		client.PrependReactor("list", forbidden, func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: forbidden}, "", nil)
		})
		return client
	}
	s, err := snapshot.Take(t.Context(), client("poddisruptionbudgets"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(written(t, s)), "hidden") {
		t.Error("it has what was secret")
	}
	if len(s.Pods) != 2 || s.Pods[1].Name != "late" || len(s.Missing) != 1 || s.Missing[0].Resource != "poddisruptionbudgets.policy" {
		t.Errorf("%d pods, missing %v", len(s.Pods), s.Missing)
	}
	if _, err := snapshot.Take(t.Context(), client("resourceslices")); err == nil || !strings.Contains(err.Error(),
		"list resourceslices.resource.k8s.io (manifests/kubectl/reader.yaml") {
		t.Errorf("error %v", err)
	}
}

// Who needs some resources alone has the others not listed.
func TestTakeSome(t *testing.T) {
	var objects []runtime.Object
	for object := range small().All() {
		objects = append(objects, object)
	}
	client := fake.NewSimpleClientset(objects...)
	s, err := snapshot.Take(t.Context(), client, "pods", "nodes")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, action := range client.Actions() {
		if action.GetVerb() == "list" {
			listed = append(listed, action.GetResource().Resource)
		}
	}
	if diff := cmp.Diff([]string{"nodes", "pods"}, listed); diff != "" || len(s.Pods) != 2 || len(s.Nodes) != 2 || len(s.ResourceSlices) != 0 {
		t.Errorf("%s%d pods, %d nodes, %d slices", diff, len(s.Pods), len(s.Nodes), len(s.ResourceSlices))
	}
}

// A pool that is called after its node, and a part of it, is of this node with hashed names, too.
func TestHashedPoolsAreOfTheirNodes(t *testing.T) {
	node := "worker-0"
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{
		NodeName: &node, Pool: resourceapi.ResourcePool{Name: node + "/mig", ResourceSliceCount: 1},
	}}
	hashed, err := snapshot.New(snapshot.Objects{
		Nodes: []*v1.Node{{ObjectMeta: metav1.ObjectMeta{Name: node}}}, ResourceSlices: []*resourceapi.ResourceSlice{slice},
	}).Hash()
	if err != nil {
		t.Fatal(err)
	}
	spec := &hashed.ResourceSlices[0].Spec
	if owner, rest, _ := strings.Cut(spec.Pool.Name, "/"); owner != *spec.NodeName || rest == "" || strings.Contains(rest, "mig") {
		t.Errorf("pool %s of node %s", spec.Pool.Name, *spec.NodeName)
	}
}

// A volume that users have bound to a claim, without its kind, is bound to it with hashed names, too.
func TestHashedVolumesKeepTheirClaims(t *testing.T) {
	volume := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "disk"}}
	volume.Spec.ClaimRef = &v1.ObjectReference{Namespace: "a", Name: "data"}
	claim := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "data"}}
	hashed, err := snapshot.New(snapshot.Objects{
		PersistentVolumes: []*v1.PersistentVolume{volume}, PersistentVolumeClaims: []*v1.PersistentVolumeClaim{claim},
	}).Hash()
	if err != nil {
		t.Fatal(err)
	}
	if ref, claim := hashed.PersistentVolumes[0].Spec.ClaimRef, hashed.PersistentVolumeClaims[0]; ref.Name != claim.Name || ref.Namespace != claim.Namespace {
		t.Errorf("the volume is for %s/%s, the claim is %s/%s", ref.Namespace, ref.Name, claim.Namespace, claim.Name)
	}
}
