// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Field is one argument of the plugin DeviceClaims, as users write it.
type Field struct {
	// Path is its place below args, such as "fence.timeout".
	Path string
	// Kind is what is written there.
	Kind Kind
	// Doc is what it means.
	Doc string
	// Default is its value when it is not set; empty if that is nothing.
	Default string
}

// Kind is what an argument takes, in words.
type Kind string

// The kinds of arguments.
const (
	Duration Kind = "duration"
	Boolean  Kind = "boolean"
	Integer  Kind = "integer"
	String   Kind = "string"
)

// Fields returns all arguments in the order of their types. Kinds and defaults are those of the types themselves, and the
// texts are the types' own.
func Fields() []Field {
	defaults := &DeviceClaimsArgs{}
	SetDefaultsDeviceClaimsArgs(defaults)
	return fieldsOf("", reflect.ValueOf(*defaults))
}

// fieldsOf returns the fields of a struct with defaults. A pointer to a struct is a section.
func fieldsOf(prefix string, value reflect.Value) []Field {
	docs := value.Interface().(interface{ SwaggerDoc() map[string]string }).SwaggerDoc()
	var fields []Field
	for i := range value.NumField() {
		name, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
		if name == "" {
			continue // apiVersion and kind
		}
		field := value.Field(i)
		kind, ok := kindOf(field.Type())
		if !ok {
			fields = append(fields, fieldsOf(prefix+name+".", field.Elem())...)
			continue
		}
		// The text of a Go field begins with its Go name.
		doc := name + strings.TrimPrefix(docs[name], value.Type().Field(i).Name)
		fields = append(fields, Field{Path: prefix + name, Kind: kind, Doc: strings.TrimSpace(doc), Default: written(field)})
	}
	return fields
}

// kindOf tells what a field takes, and false for a section.
func kindOf(t reflect.Type) (Kind, bool) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[metav1.Duration]():
		return Duration, true
	case t.Kind() == reflect.Bool:
		return Boolean, true
	case t.Kind() == reflect.String:
		return String, true
	case t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64:
		return Integer, true
	}
	return "", false
}

// written is a value as users write it: 10m, not 10m0s.
func written(value reflect.Value) string {
	if d, ok := value.Interface().(*metav1.Duration); ok {
		text := d.Duration.String()
		for _, zero := range []string{"m0s", "h0m"} {
			if strings.HasSuffix(text, zero) {
				text = text[:len(text)-2]
			}
		}
		return text
	}
	if value.Kind() == reflect.Pointer {
		value = value.Elem()
	}
	return fmt.Sprint(value.Interface())
}

// Misfit is an argument that cannot be read.
type Misfit struct {
	Path string
	// Value is what is there, as JSON.
	Value string
	// Problem says what is wrong, Change what would help.
	Problem, Change string
}

// Misfits returns the arguments that the types cannot hold, each by its path: unknown ones and those of another kind. It
// takes them out of args, so that what remains can be decoded.
func Misfits(args map[string]any) []Misfit {
	return misfitsOf("", args, Fields())
}

func misfitsOf(prefix string, args map[string]any, fields []Field) []Misfit {
	var misfits []Misfit
	for _, name := range slices.Sorted(maps.Keys(args)) {
		path, value := prefix+name, args[name]
		if prefix == "" && (name == "apiVersion" || name == "kind") {
			continue
		}
		misfit := func(problem, change string) {
			misfits = append(misfits, Misfit{Path: path, Value: jsonText(value), Problem: problem, Change: change})
			delete(args, name)
		}
		if i := slices.IndexFunc(fields, func(f Field) bool { return f.Path == path }); i >= 0 {
			if value != nil && !fields[i].Kind.fits(value) {
				misfit(fmt.Sprintf("%s takes a value of type %s, not %s", path, fields[i].Kind, jsonText(value)), fields[i].Kind.advice(fields[i]))
			}
			continue
		}
		if !slices.ContainsFunc(fields, func(f Field) bool { return strings.HasPrefix(f.Path, path+".") }) {
			misfit(fmt.Sprintf("unknown field %q", path), "use one of "+strings.Join(siblings(prefix, fields), ", "))
			continue
		}
		section, ok := value.(map[string]any)
		switch {
		case ok:
			misfits = append(misfits, misfitsOf(path+".", section, fields)...)
		case value != nil:
			misfit(fmt.Sprintf("%s has fields of its own, not the value %s", path, jsonText(value)),
				"set one of "+strings.Join(siblings(path+".", fields), ", "))
		}
	}
	return misfits
}

// siblings are the fields and sections directly below a prefix.
func siblings(prefix string, fields []Field) []string {
	var names []string
	for _, field := range fields {
		rest, ok := strings.CutPrefix(field.Path, prefix)
		name, _, _ := strings.Cut(rest, ".")
		if ok && !slices.Contains(names, prefix+name) {
			names = append(names, prefix+name)
		}
	}
	return names
}

// fits tells whether a decoded JSON value is of the kind.
func (k Kind) fits(value any) bool {
	data, err := json.Marshal(value)
	if err != nil {
		return false
	}
	target := map[Kind]any{Duration: new(metav1.Duration), Boolean: new(bool), Integer: new(int64), String: new(string)}[k]
	return json.Unmarshal(data, target) == nil
}

// advice says what to write.
func (k Kind) advice(field Field) string {
	example := map[Kind]string{
		Duration: "write a number with a unit in quotes, such as \"300ms\", \"10s\" or \"10m\"",
		Boolean:  "write true or false, without quotes",
		Integer:  "write a whole number, without quotes",
		String:   "write a name, in quotes if it looks like a number",
	}[k]
	if field.Default == "" {
		return example
	}
	return example + "; the default is " + field.Default
}

func jsonText(value any) string {
	data, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(data)
}
