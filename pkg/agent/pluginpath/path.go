// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/topology"
)

// What pods ask for. Replicas have NVIDIA's name for resources that are renamed (renameByDefault), always: a pod that asks for GPUResource
// gets a GPU that no other pod has, on all nodes.
const (
	GPUResource    = "nvidia.com/gpu"
	SharedResource = "nvidia.com/gpu.shared"
)

const (
	// pluginInterval is how often it is looked what is to be offered by the device plugin API.
	pluginInterval = 2 * time.Second
	// podsAge is how long a list of the node's pods is good for: one serves all devices of a look.
	podsAge = 10 * time.Second
)

// Hardware is the node's GPUs.
type Hardware interface {
	// Node is what the last look at the node has found, nil if there was none. Nobody changes it.
	Node() *discovery.Node
	// Resources are the GPUs as they would be published for claims; ok is false while nothing is known.
	Resources(pool string) (resources resourceslice.DriverResources, ok bool)
}

// Options of a node's path.
type Options struct {
	// Driver and Node are the names of the DRA driver and of its pool.
	Driver, Node string
	// KubeletRoot is the kubelet's folder, /var/lib/kubelet.
	KubeletRoot string
	Client      kubernetes.Interface
	// SlicesOfNode is the field selector of the slices that the node has of the driver.
	SlicesOfNode string
	// Pods lists the node's pods.
	Pods     func(context.Context) ([]corev1.Pod, error)
	Devices  Devices
	Hardware Hardware
	Claims   *prepare.Manager
	Records  *ledger.Ledger
	// Sharing is how GPUs are shared.
	Sharing config.Rules
	// PlaceOf is where an offer is on its GPU, nil if it is all of it.
	PlaceOf func(*discovery.Offer) *ledger.Partition
	// Quarantined is called when a GPU may have come into quarantine, or out of it.
	Quarantined func()
	// Tell makes an event of the Node.
	Tell func(kind, reason, message string)
	// Failed tells whether what has this name failed for another reason than the last time. Success is nil.
	Failed func(name string, err error) bool
}

// Path keeps GPUs on one of the paths: those that are offered by the device plugin API are in no slice, and the other way round.
type Path struct {
	opts   Options
	source hold.Source
	server deviceplugin.Options
	mig    MIGStrategy
	listed listed

	mu     sync.Mutex
	paths  advertise.Paths
	moving moving
	// withdrawn GPUs were in no slice of the node after this agent had begun to publish.
	withdrawn sets.Set[string]
	// held are the GPUs that pods have by the device plugin API, as last known.
	held sets.Set[string]
	// claimed are the GPUs that claims have, as last known.
	claimed sets.Set[string]
	offered offered
}

// offered is what the kubelet is told.
type offered struct {
	resources []deviceplugin.Resource
	// of is the look at the node by which the table was made.
	of      *discovery.Node
	changed chan struct{}
}

var (
	_ deviceplugin.Inventory = &Path{}
	_ deviceplugin.Holder    = &Path{}
)

// New returns the path of a node on which all GPUs are for claims until Advertise is called.
func New(opts Options) *Path {
	p := &Path{
		opts: opts, withdrawn: sets.New[string](), held: sets.New[string](), claimed: sets.New[string](),
		listed: listed{missing: map[ledger.PluginDevice]time.Time{}}, offered: offered{changed: make(chan struct{})},
		moving: moving{allocating: map[string]int{}, leaving: sets.New[string]()},
	}
	dir := filepath.Join(opts.KubeletRoot, "device-plugins")
	p.server = deviceplugin.Options{Dir: dir, Inventory: p, Holder: p, Clock: clock.RealClock{}}
	p.source = hold.Source{
		Driver: opts.Driver, Pool: opts.Node, Ledger: opts.Records,
		Checkpoint: func() (*hold.Checkpoint, error) { return hold.ReadCheckpoint(dir) },
		Pods:       recent(podsAge, opts.Pods),
	}
	return p
}

// Advertised says how GPUs are offered by the device plugin API.
type Advertised struct {
	// Paths of all GPUs.
	Paths advertise.Paths
	// Strategies to tell the container runtime of them.
	Strategies []deviceplugin.Strategy
	// MIG is MIGNone if empty.
	MIG MIGStrategy
}

// Advertise is to be called before Run.
func (p *Path) Advertise(as Advertised) {
	p.paths, p.moving.flag, p.server.Strategies, p.mig = as.Paths, as.Paths, as.Strategies, as.MIG
}

// Claim is what stands for a device that pods have, as [hold.Source] has it.
func (p *Path) Claim(ctx context.Context, name string) (*resourceapi.ResourceClaim, error) {
	return p.source.Claim(ctx, name)
}

// recent returns a source that asks again only when the answer is older than that.
func recent(age time.Duration, pods func(context.Context) ([]corev1.Pod, error)) func(context.Context) ([]corev1.Pod, error) {
	var (
		mu   sync.Mutex
		last []corev1.Pod
		at   time.Time
	)
	return func(ctx context.Context) ([]corev1.Pod, error) {
		mu.Lock()
		defer mu.Unlock()
		if !at.IsZero() && time.Since(at) < age {
			return last, nil
		}
		begun := time.Now()
		list, err := pods(ctx)
		if err == nil {
			last, at = list, begun
		}
		return list, err
	}
}

// pathsOf are the paths of the node's GPUs by name. The caller has the lock.
func (p *Path) pathsOf(node *discovery.Node) map[string]advertise.Path {
	if node == nil {
		return nil
	}
	return p.paths.On(node)
}

// Taint is that of a device of a GPU that has another path by now, and that a claim still has. Nobody else gets it by a claim. Without
// it in the slices the scheduler would not know that a claim has what a device plugin may give away.
func Taint(driver string, path advertise.Path) resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: driver + "/other-path", Value: string(path), Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// ForClaims are the hardware's resources without GPUs that are on another path, or that a pod still has by the device plugin API. Those
// that claims have stay, with a taint. It reads nothing: the disk may hang.
func (p *Path) ForClaims(pool string) (resourceslice.DriverResources, bool) {
	resources, ok := p.opts.Hardware.Resources(pool)
	if !ok {
		return resources, false
	}
	node := p.opts.Hardware.Node()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paths.ClaimsOnly() && len(p.held)+len(p.moving.leaving)+len(p.moving.allocating) == 0 {
		return resources, true
	}
	paths := p.pathsOf(node)
	resources = advertise.Withhold(resources, func(gpu string) bool {
		return paths[gpu] != advertise.DRA && !p.claimed.Has(gpu) || p.held.Has(gpu) || p.moving.leaving.Has(gpu) || p.moving.allocating[gpu] > 0
	})
	for _, pool := range resources.Pools {
		for _, slice := range pool.Slices {
			for i := range slice.Devices {
				device := &slice.Devices[i]
				if path := paths[advertise.GPUOf(device.Name)]; path != advertise.DRA {
					device.Taints = append(slices.Clip(device.Taints), Taint(p.opts.Driver, path))
				}
			}
		}
	}
	return resources, true
}

// HeldChanged reads which GPUs pods have by the device plugin API, and which claims have, and reports whether that were others
// before, as far as it changes what is published. Where the ledger cannot be read, they are as they were.
func (p *Path) HeldChanged() bool {
	node := p.opts.Hardware.Node()
	p.mu.Lock()
	given := p.moving.given
	p.mu.Unlock()
	records, err := p.opts.Records.Records()
	if err != nil {
		return false
	}
	held, claimed := sets.New[string](), sets.New[string]()
	for _, record := range records {
		switch {
		case record.Entry == nil:
		case record.Entry.Claim.Plugin != (ledger.PluginDevice{}):
			held.Insert(record.Entry.HeldGPUs()...)
		default:
			claimed.Insert(record.Entry.HeldGPUs()...)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.moving.given != given { // and may not have been in the ledger when it was read
		held = held.Union(p.held)
	}
	changed := !held.Equal(p.held)
	for gpu, path := range p.pathsOf(node) {
		if path != advertise.DRA && claimed.Has(gpu) != p.claimed.Has(gpu) {
			changed = true
			p.withdrawn.Delete(gpu) // it was in the slices, or comes back to them
		}
	}
	p.held, p.claimed = held, claimed
	return changed
}

// Run offers GPUs by the device plugin API until ctx ends. It begins when no other agent of the node publishes slices. changed is called
// when other GPUs are to be withheld from claims.
func (p *Path) Run(ctx context.Context, leads <-chan struct{}, changed func()) {
	select {
	case <-ctx.Done():
		return
	case <-leads:
	}
	// The agent before may have given GPUs to pods until now.
	if p.HeldChanged() {
		changed()
	}
	var group sync.WaitGroup
	defer group.Wait()
	ticker := time.NewTicker(pluginInterval)
	defer ticker.Stop()
	for serves := false; ; {
		if p.usesAPI() {
			if !serves {
				serves = true
				group.Go(func() { deviceplugin.New(p.server).Run(ctx) })
			}
			if p.Step(ctx) {
				changed()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Step takes each GPU on its way as far as it can go now. It reports whether other GPUs than before are to be withheld from claims.
func (p *Path) Step(ctx context.Context) (changed bool) {
	if err := p.Look(ctx); p.opts.Failed("look", err) && ctx.Err() == nil {
		utilruntime.HandleErrorWithContext(ctx, err, "What is offered by the device plugin API cannot be told for certain")
	}
	p.waits(ctx)
	left := p.left(ctx)
	return p.HeldChanged() || left
}

// usesAPI tells whether the device plugin API offers GPUs, has offered some, pods have some from it, or some have yet to
// be proved to have left it.
func (p *Path) usesAPI() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.paths.ClaimsOnly() || len(p.offered.resources)+len(p.held)+len(p.moving.leaving) > 0
}

// Look finds what is to be offered now. A GPU that is not certain to have left the slices is not offered; one that was offered before
// stays, unhealthy if it is not what it was.
func (p *Path) Look(ctx context.Context) error {
	node := p.opts.Hardware.Node()
	resources, ok := p.opts.Hardware.Resources(p.opts.Node)
	if node == nil || !ok {
		return nil
	}
	p.mu.Lock()
	paths, changes := p.paths, p.moving.changes
	p.mu.Unlock()
	var unknown error
	if names := paths.Unknown(node); len(names) > 0 {
		unknown = fmt.Errorf("this node has no GPU %s", strings.Join(names, ", "))
		if slices.ContainsFunc(node.GPUs, func(gpu discovery.GPU) bool { return gpu.Unseen() }) {
			unknown = fmt.Errorf("%w; a UUID may be that of one that vfio-pci has, which is offered by nothing then: name it by its address, "+
				"or annotate the Node %s", unknown, Annotation)
		}
	}
	if p.opts.Failed("unknown", unknown) {
		klog.FromContext(ctx).Info("--advertise names GPUs that are not there", "reason", unknown.Error())
	}
	devices := p.candidates(node, &paths)
	proofErr := p.prove(ctx, devices, changes)
	usable := usableDevices(resources)
	var (
		errs    []error
		of      string // whose holders these are: candidates of a GPU follow one another
		holders []*ledger.Record
		err     error
	)
	offered := map[string][]deviceplugin.Device{}
	for _, c := range devices {
		if !p.isWithdrawn(c.gpu.Name) {
			continue
		}
		if of != c.gpu.Name {
			of = c.gpu.Name
			if holders, err = p.opts.Records.Holders(of); err != nil {
				errs = append(errs, fmt.Errorf("whether somebody has GPU %s: %w", of, err))
			}
		}
		c.device.Healthy = err == nil && isFree(c, holders) && usable.Has(c.device.Name)
		offered[c.resource] = append(offered[c.resource], c.device)
	}
	err = p.keepHeld(node, offered)
	p.offer(node, offered, changes)
	return errors.Join(append(errs, proofErr, err)...)
}

// usableDevices have no taint that keeps pods away: what keeps claims from a GPU keeps others from it, too.
func usableDevices(resources resourceslice.DriverResources) sets.Set[string] {
	usable := sets.New[string]()
	for _, pool := range resources.Pools {
		for _, slice := range pool.Slices {
			for _, device := range slice.Devices {
				if !slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone }) {
					usable.Insert(device.Name)
				}
			}
		}
	}
	return usable
}

// isFree tells whether nobody holds the device, or a place that it overlaps, but by the same resource and ID. Replicas are held beside
// those that take as much of the GPU: of others there may be too many.
func isFree(c candidate, holders []*ledger.Record) bool {
	own := ledger.PluginDevice{Resource: c.resource, ID: c.device.ID}
	return !slices.ContainsFunc(holders, func(r *ledger.Record) bool {
		switch {
		case r.Entry == nil:
			return true
		case r.Entry.Claim.Plugin == own:
			return false
		}
		return slices.ContainsFunc(r.Entry.Devices, func(d ledger.Device) bool {
			beside := c.share != nil && d.Share != nil && *d.Share == *c.share && r.Entry.Claim.Plugin.Resource == c.resource
			return !d.AdminAccess && d.GPU == c.gpu.Name && d.Partition.Overlaps(c.at) && !beside
		})
	})
}

// prove asks the API server whether GPUs have left the slices of the node, once the Node has been read. A kubelet that starts has deleted
// all slices, which says nothing of a GPU's path, nor of one that a claim has. If the paths have changed since the look began, the
// next one asks again.
func (p *Path) prove(ctx context.Context, devices []candidate, changes int) error {
	p.mu.Lock()
	known := p.moving.known
	p.mu.Unlock()
	if !known || !slices.ContainsFunc(devices, func(c candidate) bool { return !p.isWithdrawn(c.gpu.Name) }) {
		return nil
	}
	list, err := p.opts.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: p.opts.SlicesOfNode})
	if err != nil {
		return fmt.Errorf("list ResourceSlices, to offer GPUs that are not in them: %w", err)
	}
	published := sets.New[string]()
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			published.Insert(advertise.GPUOf(device.Name))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range devices {
		if p.moving.changes == changes && !published.Has(c.gpu.Name) && !p.claimed.Has(c.gpu.Name) {
			p.withdrawn.Insert(c.gpu.Name)
		}
	}
	return nil
}

// isWithdrawn tells whether it is certain that no slice has the GPU. One that a pod has is in none.
func (p *Path) isWithdrawn(gpu string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.withdrawn.Has(gpu) || p.held.Has(gpu)
}

// offer tells the kubelet what there is now, if that is something else than before, and if the paths have not changed since the look
// began. What was offered and is not there any more stays, unhealthy.
func (p *Path) offer(node *discovery.Node, devices map[string][]deviceplugin.Device, changes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.moving.changes != changes {
		return
	}
	var now []deviceplugin.Resource
	same := true
	before := map[string]*deviceplugin.Resource{}
	for i := range p.offered.resources {
		resource := &p.offered.resources[i]
		before[resource.Name] = resource
		if devices[resource.Name] == nil {
			devices[resource.Name] = []deviceplugin.Device{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		resource := deviceplugin.Resource{Name: name, Devices: devices[name]}
		was := before[name]
		if was == nil {
			was = &deviceplugin.Resource{}
		}
		for _, lost := range was.Devices {
			if !slices.ContainsFunc(resource.Devices, func(d deviceplugin.Device) bool { return d.ID == lost.ID }) {
				lost.Healthy = false
				resource.Devices = append(resource.Devices, lost)
			}
		}
		slices.SortFunc(resource.Devices, func(a, b deviceplugin.Device) int {
			return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
		})
		switch name {
		case GPUResource:
			resource.Table = p.tableOf(node, resource.Devices, was)
		case SharedResource:
			resource.Shared, resource.Single = true, p.opts.Sharing.Shares == config.MPS
		}
		same = same && slices.EqualFunc(was.Devices, resource.Devices, func(a, b deviceplugin.Device) bool { return reflect.DeepEqual(a, b) })
		now = append(now, resource)
	}
	p.offered.resources, p.offered.of = now, node
	if !same {
		close(p.offered.changed)
		p.offered.changed = make(chan struct{})
	}
}

// tableOf numbers the devices in the order of the table of their GPUs, which is made anew with each look at the node.
func (p *Path) tableOf(node *discovery.Node, devices []deviceplugin.Device, was *deviceplugin.Resource) *topology.Table {
	names := make([]string, len(devices))
	for i := range devices {
		devices[i].GPU, names[i] = i, devices[i].Name
	}
	if node == p.offered.of && len(devices) == len(was.Devices) {
		return was.Table
	}
	return topology.NewTable(topology.NewMatrix(node.Topology(names)))
}

// Resources implements deviceplugin.Inventory.
func (p *Path) Resources() ([]deviceplugin.Resource, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offered.resources, p.offered.changed
}
