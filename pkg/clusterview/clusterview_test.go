package clusterview_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// A GPU's state follows from who holds what of it, and whether it can be had.
func TestStates(t *testing.T) {
	c := snapshottest.New(2, 4)
	c.Run("a", "one", 0, 0, 1)
	_, admin := c.Run("a", "monitor", 0, 0, 0)
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	c.Taint(0, 2, "xid")
	_, gone := c.Run("b", "old", 0, 1, 0)
	gone.Status.Allocation.Devices.Results[0].Device = "gpu-lost"
	slice := c.ResourceSlices[1]
	slice.Spec.Devices[1].AllowMultipleAllocations = ptr.To(true)
	for _, name := range []string{"s1", "s2"} {
		_, claim := c.Run("b", name, 0, 1, 1)
		claim.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(name))
		claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")}
	}
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	for _, place := range []string{"0", "4"} {
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{
			Name: "gpu-2-mig-3g40gb-" + place,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": text("mig"), "parentUUID": text("GPU-1-2"), "profile": text("3g.40gb"),
			},
		})
	}
	_, part := c.Run("b", "part", 0, 1, 2)
	part.Status.Allocation.Devices.Results[0].Device = "gpu-2-mig-3g40gb-4"
	c.DeviceTaintRules = append(c.DeviceTaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To("worker-1"), Device: ptr.To("gpu-3")},
		Taint:          resourceapi.DeviceTaint{Key: "drain", Effect: resourceapi.DeviceTaintEffectNoExecute},
	}}, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{Taint: resourceapi.DeviceTaint{
		Key:    "none",
		Effect: resourceapi.DeviceTaintEffectNoExecute,
	}}})

	got := map[string]string{}
	gpus := clusterview.GPUs(c.Snapshot())
	for _, g := range gpus {
		got[g.Node+"/"+g.Device] = string(g.State) + " " + g.Layout()
		if g.SharedMemoryBytes != nil && *g.SharedMemoryBytes != 20<<30 {
			t.Errorf("shares take %d", *g.SharedMemoryBytes)
		}
	}
	if diff := cmp.Diff(map[string]string{
		"worker-0/gpu-0": "free ", "worker-0/gpu-1": "held ", "worker-0/gpu-2": "tainted ", "worker-0/gpu-3": "free ",
		"worker-1/gpu-0": "free ", "worker-1/gpu-1": "shared ", "worker-1/gpu-2": "partitioned 3g.40gb", "worker-1/gpu-3": "tainted ", "worker-1/gpu-lost": "gone ",
	}, got); diff != "" {
		t.Error(diff)
	}
	totals := clusterview.Total(gpus)
	if diff := cmp.Diff(&clusterview.Group{Node: "worker-0", Size: 2, Link: clusterview.NVLink}, totals.LargestFree); diff != "" {
		t.Error(diff)
	}
	sizes := clusterview.Sizes(gpus)
	if s := sizes[1]; s.GPUs != 2 || s.Fit != 1 || s.Ideal != 1 || s.Linked != 1 {
		t.Errorf("pairs: %+v", s)
	}
}

// A device that is not there is not free, even if somebody merely looks at it; and those of the network are on no node.
func TestWhatIsOnNoNode(t *testing.T) {
	c := snapshottest.New(1, 2)
	_, admin := c.Run("a", "monitor", 0, 0, 0)
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	admin.Status.Allocation.Devices.Results[0].Device = "gpu-lost"
	network := c.ResourceSlices[0].DeepCopy()
	network.Name, network.Spec.Pool.Name, network.Spec.NodeName, network.Spec.AllNodes = "network", "network", nil, ptr.To(true)
	for g := range 2 {
		network.Spec.Devices = append(network.Spec.Devices, *network.Spec.Devices[g].DeepCopy())
		network.Spec.Devices[2+g].Name += "-more"
		network.Spec.Devices[2+g].Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: ptr.To(network.Spec.Devices[2+g].Name)}
	}
	c.ResourceSlices = append(c.ResourceSlices, network)
	gpus := clusterview.GPUs(c.Snapshot())
	totals := clusterview.Total(gpus)
	if diff := cmp.Diff(clusterview.Totals{
		Nodes: 1, GPUs: 7, States: map[clusterview.State]int{clusterview.Free: 6, clusterview.Gone: 1},
		LargestFree: &clusterview.Group{Node: "worker-0", Size: 2, Link: clusterview.NVLink},
	}, totals); diff != "" {
		t.Error(diff)
	}
	if sizes := clusterview.Sizes(gpus); sizes[len(sizes)-1].GPUs != 2 || sizes[0].Fit != 2 {
		t.Errorf("%+v", sizes[0])
	}
}

// A device of which nothing is reported is not ready.
func TestReadiness(t *testing.T) {
	c := snapshottest.New(1, 2)
	_, claim := c.Run("a", "one", 0, 0, 0, 1)
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: snapshottest.Driver, Pool: "worker-0", Device: "gpu-0", Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue}},
	}}
	if got := clusterview.Claims(c.Snapshot())[0].Ready; got != "1/2" {
		t.Errorf("ready %s", got)
	}
}

func TestFreeGroups(t *testing.T) {
	place := func(domain string, numa int) *clusterview.GPU {
		return &clusterview.GPU{Node: "n", State: clusterview.Free, Place: clusterview.Place{NVLinkDomain: domain, NUMANode: &numa}}
	}
	for name, tc := range map[string]struct {
		gpus []*clusterview.GPU
		want []clusterview.Group
	}{
		"none": {},
		"one":  {[]*clusterview.GPU{place("a", 0)}, []clusterview.Group{{Node: "n", Size: 1}}},
		"farther is larger": {
			[]*clusterview.GPU{place("a", 0), place("a", 0), place("b", 0), place("c", 1)},
			[]clusterview.Group{{"n", 2, clusterview.NVLink}, {"n", 3, clusterview.SameNUMA}, {"n", 4, clusterview.System}},
		},
		"all are linked": {[]*clusterview.GPU{place("a", 0), place("a", 1)}, []clusterview.Group{{"n", 2, clusterview.NVLink}}},
	} {
		if diff := cmp.Diff(tc.want, clusterview.FreeGroups(tc.gpus)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
