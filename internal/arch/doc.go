// Package arch holds no code of the product: its test checks that the imports
// of every package keep the order of the rooms in docs/design.md.
package arch
