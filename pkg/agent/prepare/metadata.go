package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Device metadata (KEP-5304) tells a container by a file what devices its requests got: their names and attributes, such as
// PCI addresses. There is a file for each request, mounted where k8s.io/dynamic-resource-allocation/api/metadata says. The
// files go with the claim's CDI specification, which mounts them: they are written before it, and removed after it, by the same
// step of the undo log. The plugin library's own writer (kubeletplugin.EnableDeviceMetadata) is not used, as
// it goes on without the files when they cannot be written, and does not put back what is lost.

// metadataDir has a folder for each claim. Containers see its files, and nobody else has to.
func (m *Manager) metadataDir() string { return filepath.Join(m.opts.StateDir, "metadata") }

func (m *Manager) metadataOf(claim types.UID) string {
	return filepath.Join(m.metadataDir(), string(claim))
}

func (m *Manager) metadataPath(claim types.UID, request string) string {
	return filepath.Join(m.metadataOf(claim), request+".json")
}

// describeMetadata returns the content of the claim's files by their requests' names. Its devices are made.
func (m *Manager) describeMetadata(j *job) (map[string]json.RawMessage, error) {
	described := map[string]*v1beta1.DeviceMetadata{}
	for i, device := range j.entry.Devices {
		request := resourceclaim.BaseRequestRef(device.Request)
		of := described[request]
		if of == nil {
			of = &v1beta1.DeviceMetadata{
				TypeMeta: metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: "DeviceMetadata"},
				ObjectMeta: metav1.ObjectMeta{
					Namespace: j.entry.Claim.Namespace, Name: j.entry.Claim.Name, UID: j.entry.Claim.UID, Generation: 1,
				},
				Requests: []v1beta1.DeviceMetadataRequest{{Name: device.Request}},
			}
			if j.podClaim != "" {
				of.PodClaimName = &j.podClaim
			}
			described[request] = of
		}
		attributes := maps.Clone(j.targets[i].Attributes)
		if device.Partition != nil && attributes != nil {
			// A partition that is made for the claim is published before it has one.
			attributes[discovery.AttributeUUID] = resourceapi.DeviceAttribute{StringValue: &device.UUID}
		}
		of.Requests[0].Devices = append(of.Requests[0].Devices, v1beta1.Device{
			Driver: m.opts.Driver, Pool: device.Pool, Name: device.Device, Attributes: attributes,
		})
	}
	encoded := make(map[string]json.RawMessage, len(described))
	for request, of := range described {
		data, err := json.Marshal(of)
		if err != nil {
			return nil, fmt.Errorf("claim %s, request %s: encode device metadata: %w", j.entry.Claim, request, err)
		}
		encoded[request] = data
	}
	return encoded, nil
}

// metadataMount shows the file to the containers that get the claim's i-th device, if that is the first one of its request:
// who gets one device of a request gets all of them.
func (m *Manager) metadataMount(j *job, i int) *specs.Mount {
	request := resourceclaim.BaseRequestRef(j.entry.Devices[i].Request)
	first := slices.IndexFunc(j.entry.Devices, func(d ledger.Device) bool { return resourceclaim.BaseRequestRef(d.Request) == request })
	if first != i {
		return nil
	}
	path := metadata.ResourceClaimFilePath(m.opts.Driver, j.entry.Claim.Name, request)
	if j.podClaim != "" {
		path = metadata.ResourceClaimTemplateFilePath(m.opts.Driver, j.podClaim, request)
	}
	return &specs.Mount{
		HostPath:      m.metadataPath(j.entry.Claim.UID, request),
		ContainerPath: path,
		Options:       []string{"ro", "nosuid", "nodev", "bind"},
	}
}

// restoreFiles writes what the claim's containers are given, as recorded, unless it is there already, and tells whether
// anything was written.
func (m *Manager) restoreFiles(entry *ledger.Entry) (written bool, err error) {
	claim := entry.Claim.UID
	if len(entry.Metadata) > 0 {
		if err := m.opts.FS.MkdirAll(m.metadataOf(claim), 0o700); err != nil {
			return false, fmt.Errorf("make the folder for device metadata of claim %s: %w", claim, err)
		}
	}
	for _, request := range slices.Sorted(maps.Keys(entry.Metadata)) {
		// Containers of any user read it.
		wrote, err := durable.Restore(m.opts.FS, m.metadataPath(claim, request), append(slices.Clone(entry.Metadata[request]), '\n'), 0o644)
		if err != nil {
			return written, fmt.Errorf("write device metadata of claim %s, request %s: %w", claim, request, err)
		}
		written = written || wrote
	}
	wrote, err := m.store.Restore(claim, entry.CDISpec)
	return written || wrote, err
}

// removeMetadata is the end of what restoreFiles has written, after the CDI specification.
func (m *Manager) removeMetadata(claim types.UID) error {
	files, err := m.opts.FS.ReadDir(m.metadataOf(claim))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		err = errors.Join(err, m.opts.FS.Remove(filepath.Join(m.metadataOf(claim), file.Name())))
	}
	if err == nil {
		err = durable.Remove(m.opts.FS, m.metadataOf(claim))
	}
	if err != nil {
		return fmt.Errorf("remove device metadata of claim %s: %w", claim, err)
	}
	return nil
}

// sweepMetadata removes the files of claims that have neither a record nor a CDI specification: an older agent, which does not know of
// metadata, has unprepared these, or their specification was a stray.
func (m *Manager) sweepMetadata(ctx context.Context, records []*ledger.Record) error {
	folders, err := m.opts.FS.ReadDir(m.metadataDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list device metadata: %w", err)
	}
	var errs []error
	for _, folder := range folders {
		claim := types.UID(folder.Name())
		if slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.UID == claim }) {
			continue
		}
		errs = append(errs, m.sweepMetadataOf(ctx, claim))
	}
	return errors.Join(errs...)
}

func (m *Manager) sweepMetadataOf(ctx context.Context, claim types.UID) error {
	locks := m.locks.begin()
	defer locks.unlock()
	if err := locks.claim(ctx, claim); err != nil {
		return fmt.Errorf("remove device metadata of claim %s: %w", claim, err)
	}
	// It may have been prepared since the records were read.
	if record, err := m.ledger.Get(claim); err != nil || record != nil {
		return err
	}
	// As long as a container can be given the claim's devices, it is to be given these, too.
	if _, err := m.opts.FS.ReadFile(m.store.Path(claim)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return m.removeMetadata(claim)
}
